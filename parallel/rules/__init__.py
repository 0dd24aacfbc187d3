"""Every rule that a configuration must satisfy, by subject: single values, how the work is laid out, the model and its rows.

A rule is a function of (config, environment) that yields a sentence for each violation: key, value, what would work. Above it stand
examples, one for each of its sentences.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from configs.schema import Config, RowSize


@dataclass(frozen=True)
class Environment:
    """What a rule may know besides the configuration."""

    world: int = 1  # processes
    command: str = "train.py"  # as typed, without the launcher; empty where nothing runs and the number is an argument
    deep_ep: bool = False  # whether the package is installed beside a GPU
    gpu: bool = True  # whether there is one, or one is planned

    def start(self, processes: int) -> str:
        """What to do for another number of processes."""
        return f"type torchrun --nproc_per_node={processes} {self.command}" if self.command else f"give world={processes}"


Check = Callable[[Config, Environment], Iterator[str]]
Example = Mapping[str, object]  # what is changed in SOUND, and "world", "deep_ep" and "gpu" of the environment
SOUND = Config(run_dir="runs/x")  # breaks no rule on one process
SOUND.data.rows = [RowSize(tokens=100, audio_frames=90, utterances=4, utterance_frames=40, label_tokens=20)]


@dataclass(frozen=True)
class Rule:
    """What is checked, and what breaks it: an example for each kind of sentence."""

    check: Check
    examples: tuple[Example, ...]
    listed: bool  # it is about parameters, which can be listed once the sizes are right


def rule(*examples: Example, listed: bool = False) -> Callable[[Check], Rule]:
    """Makes a rule of a function."""
    return lambda check: Rule(check, examples, listed)


def value(cfg: Config, key: str) -> object:
    """The value under a dotted key."""
    result: object = cfg
    for part in key.split("."):
        result = getattr(result, part)
    return result
