"""Scores against closed forms, and the normalisers."""

import math
from types import ModuleType

import pytest

from training.scoring import Transcript, bleu, character_error_rate, lines, normalizer, scores, word_error_rate


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


def pairs(*texts: tuple[str, str]) -> list[Transcript]:
    return [Transcript(str(i), *pair) for i, pair in enumerate(texts)]


def test_character_error_rate() -> None:
    assert character_error_rate(pairs(("abcd", "abxd"), ("你好", "你"))) == pytest.approx(2 / 6)
    assert character_error_rate(pairs(("a  b", "a b"))) == 0
    assert character_error_rate(pairs(("ab", "ab"), ("", "xyz"))) == pytest.approx(3 / 2)
    assert (character_error_rate(pairs(("", "x"))), character_error_rate([])) == (1.0, 0.0)


def test_bleu_is_that_of_the_corpus() -> None:
    same = pairs(("the cat sat on the mat today", "the cat sat on the mat today"))
    assert bleu(same, "13a") == pytest.approx(100)
    assert bleu(pairs(("the cat sat on the mat", "a dog")), "13a") < 5
    # n-gram precisions 4/5, 3/4, 2/3 and 1/2, and a brevity penalty of exp(1 - 6/5)
    one = pairs(("the quick brown fox jumps high", "the quick brown fox leaps"))
    expected = 100 * math.exp(1 - 6 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert bleu(one, "13a") == pytest.approx(expected, rel=1e-6)
    assert bleu(pairs(("今天天气很好", "今天天气很好")), "zh") == pytest.approx(100)
    assert bleu([], "13a") == 0


@pytest.mark.parametrize("text, basic, english", [
    ("Hello, WORLD! [noise]", "hello world", "hello world"),
    ("It's twenty-one dollars", "it s twenty one dollars", "it is $21"),
    ("The colour isn't grey.", "the colour isn t grey", "the color is not gray"),
    ("um, Mr. Smith", "um mr smith", "mister smith"),
])
def test_normalizers(text: str, basic: str, english: str) -> None:
    assert (normalizer("none")(text), normalizer("basic")(text), normalizer("english")(text)) == (text, basic, english)


@pytest.mark.parity
def test_english_normalizer_is_the_one_that_transformers_ships(transformers: ModuleType) -> None:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    spelling = {"colour": "color", "organise": "organize"}
    theirs, ours = EnglishTextNormalizer(spelling), normalizer("english")
    for text in ("We'll organise three hundred and five colour TVs, won't we?", "it costs $3.50 or two thousand and one pounds",
                 "she's gone (laughs) to 221B Baker Street", "one oh one, double two, 20%"):
        assert ours(text) == theirs(text).strip()


def test_all_scores_and_lines() -> None:
    found = [Transcript("a", "Twenty one.", "21", 1.5), Transcript("b", "", "uh", 2.0)]
    figures = scores(found, "english", "13a")
    assert (figures["wer"], figures["cer"], figures["words"]) == (0.0, 0.0, 1)
    raw = scores(found, "none", "13a")
    assert (raw["wer"], raw["substitutions"], raw["deletions"], raw["insertions"]) == (1.5, 1, 1, 1)
    first, second = lines(found, "none")
    assert first == {"id": "a", "reference": "Twenty one.", "hypothesis": "21", "audio_sec": 1.5, "wer": 1.0, "words": 2,
                     "substitutions": 1, "deletions": 1, "insertions": 0}
    assert (second["wer"], second["words"], second["insertions"]) == (1.0, 0, 1)
