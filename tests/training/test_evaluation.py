import pytest

from training.evaluation import Transcript, word_error_rate


@pytest.mark.parametrize(("pairs", "expected"), [
    ([("one two three", "one two three")], {"wer": 0.0, "words": 3, "substitutions": 0, "deletions": 0, "insertions": 0}),
    ([("one two three", "one too three four")], {"wer": 2 / 3, "words": 3, "substitutions": 1, "deletions": 0, "insertions": 1}),
    ([("one two", ""), ("three four five six", "three four five six")],
     {"wer": 1 / 3, "words": 6, "substitutions": 0, "deletions": 2, "insertions": 0}),
    ([("", "x y"), ("one two", "one two")], {"wer": 1.0, "words": 2, "substitutions": 0, "deletions": 0, "insertions": 2}),  # in silence
    ([("", "x")], {"wer": 1.0, "words": 0, "substitutions": 0, "deletions": 0, "insertions": 1}),
    ([("", "")], {"wer": 0.0, "words": 0, "substitutions": 0, "deletions": 0, "insertions": 0}),
    ([], {"wer": 0.0, "words": 0, "substitutions": 0, "deletions": 0, "insertions": 0}),
])
def test_word_error_rate(pairs: list[tuple[str, str]], expected: dict[str, float]) -> None:
    assert word_error_rate([Transcript(str(i), *pair) for i, pair in enumerate(pairs)]) == pytest.approx(expected)
