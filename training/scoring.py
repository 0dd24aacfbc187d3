"""Scores of transcripts and translations: word and character error rates by jiwer, BLEU by sacrebleu, after normalisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jiwer

NORMALIZERS = ("none", "basic", "english")


@dataclass(frozen=True)
class Transcript:
    """What was said and what was heard."""

    id: str
    reference: str
    hypothesis: str
    audio_sec: float = 0.0


@cache
def normalizer(name: str) -> Callable[[str], str]:
    """One of NORMALIZERS: nothing; Whisper's for any language (case, punctuation, brackets); Whisper's for English (spelling, numbers,
    contractions too), with which public leaderboards score."""
    if name == "none":
        return lambda text: text
    import whisper_normalizer.basic
    import whisper_normalizer.english

    made = whisper_normalizer.english.EnglishTextNormalizer() if name == "english" else whisper_normalizer.basic.BasicTextNormalizer()
    return lambda text: str(made(text)).strip()


def normalized(transcripts: Sequence[Transcript], name: str) -> list[Transcript]:
    """The same after normalisation of both sides."""
    apply = normalizer(name)
    return [Transcript(t.id, apply(t.reference), apply(t.hypothesis), t.audio_sec) for t in transcripts]


def word_error_rate(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """WER and its parts. An utterance without a reference word counts only what was inserted there; none at all gives 0 words."""
    spoken = [t for t in transcripts if t.reference.split()]
    silent = sum(len(t.hypothesis.split()) for t in transcripts if not t.reference.split())
    if not spoken:
        return {"wer": float(silent > 0), "words": 0, "substitutions": 0, "deletions": 0, "insertions": silent}
    counted = jiwer.process_words([t.reference for t in spoken], [t.hypothesis for t in spoken])
    words = counted.hits + counted.substitutions + counted.deletions
    errors = counted.substitutions + counted.deletions + counted.insertions + silent
    return {"wer": errors / words, "words": words, "substitutions": counted.substitutions, "deletions": counted.deletions,
            "insertions": counted.insertions + silent}


def character_error_rate(transcripts: Sequence[Transcript]) -> float:
    """CER, spaces between words included; without a reference as the word error rate."""
    pairs = [(" ".join(t.reference.split()), " ".join(t.hypothesis.split())) for t in transcripts]
    spoken = [pair for pair in pairs if pair[0]]
    silent = sum(len(hypothesis) for reference, hypothesis in pairs if not reference)
    if not spoken:
        return float(silent > 0)
    counted = jiwer.process_characters([r for r, _ in spoken], [h for _, h in spoken])
    errors = counted.substitutions + counted.deletions + counted.insertions + silent
    return float(errors / (counted.hits + counted.substitutions + counted.deletions))


def bleu(transcripts: Sequence[Transcript], tokenizer: str) -> float:
    """Corpus BLEU in percent of the texts as they are, with one of sacrebleu's tokenizers."""
    import sacrebleu

    if not transcripts:
        return 0.0
    found = sacrebleu.corpus_bleu([t.hypothesis for t in transcripts], [[t.reference for t in transcripts]], tokenize=tokenizer)
    return float(found.score)


def scores(transcripts: Sequence[Transcript], name: str, bleu_tokenizer: str) -> dict[str, float]:
    """All of them; error rates of the normalised texts."""
    plain = normalized(transcripts, name)
    return {**word_error_rate(plain), "cer": character_error_rate(plain), "bleu": bleu(transcripts, bleu_tokenizer)}


def lines(transcripts: Sequence[Transcript], name: str) -> list[dict[str, Any]]:
    """One utterance each: its texts as they are, and the word errors of the normalised ones."""
    return [{**vars(t), **word_error_rate([plain])} for t, plain in zip(transcripts, normalized(transcripts, name), strict=True)]
