"""What can be wrong with data, as one sentence each: what, where, what to do."""


class DataError(ValueError):
    """A fault that ends the run."""


class UtteranceError(DataError):
    """A fault of one utterance; the policy of its reason says whether it ends the run or is skipped and counted."""

    def __init__(self, reason: str, message: str, alone: bool = False) -> None:
        super().__init__(message)
        self.reason = reason  # one of REASONS
        self.alone = alone  # nothing is left without this utterance

    def __reduce__(self) -> tuple[type["UtteranceError"], tuple[str, str, bool]]:
        return type(self), (self.reason, str(self), self.alone)  # exceptions are pickled by their args alone


REASONS = ("bad_audio", "bad_text", "too_long")


def settle(error: UtteranceError, policy: str) -> UtteranceError:
    """Ends the run under the policy fail; under skip returns the error, to be counted."""
    if error.alone:
        raise DataError(str(error)) from error
    if policy == "fail":
        raise DataError(f"{error}; repair it, or leave such utterances out with data.on_{error.reason}=skip") from error
    return error
