"""The demo task: strings of spoken numbers, appended by Lhotse from recordings of single words with random pauses, speed and gain.

Every string is a pure function of (seed, index). A string is held out by the checksum of its text, so that no string that is validated on
is ever trained on. Strings shorter than the shortest validated length (the start of the curriculum) are for training only: without the
single words that the rule holds out, some words would never be heard alone.
"""

import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
from lhotse import AudioSource, MonoCut, Recording, SupervisionSegment
from lhotse.cut import Cut

from data.audio import resample
from data.errors import DataError

SAMPLE_RATE = 16000
SPEECH = Path(__file__).parent / "speech"
WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
]
SPEEDS = ((9, 10), (1, 1), (11, 10))  # exact ratios, for resampling
MAX_PAUSE_SAMPLES = 4000  # 0.25 s, besides the silence at the ends of each recording
GAIN_DB = (-6.0, 3.0)
_TRAIN, _HELD_OUT = 0, 1  # streams of random numbers
_HELD_OUT_SEED = 0


@dataclass(frozen=True)
class DigitString:
    """How one utterance sounds."""

    words: tuple[str, ...]
    speeds: tuple[int, ...]  # index into SPEEDS, one a word
    pauses: tuple[int, ...]  # samples before each word but the first
    gain: float

    @property
    def text(self) -> str:
        return " ".join(self.words)


def is_held_out(text: str, min_words: int) -> bool:
    """Whether a string is for validation: a tenth of those that are not shorter than min_words."""
    return len(text.split()) >= min_words and zlib.crc32(text.encode()) % 10 == 0


def train_string(seed: int, index: int, min_words: int, max_words: int, held_out_words: int) -> DigitString:
    """Training string number `index` of min_words to max_words words; held-out strings have at least `held_out_words`."""
    rng = np.random.default_rng((seed, _TRAIN, index))
    while True:
        string = _draw(rng, min_words, max_words)
        if not is_held_out(string.text, held_out_words):
            return string


def held_out_strings(count: int, min_words: int, max_words: int) -> list[DigitString]:
    """`count` different held-out strings, the same whatever the run's seed."""
    strings: dict[str, DigitString] = {}
    for index in range(100 * count):  # ten times what it takes where strings are many
        string = _draw(np.random.default_rng((_HELD_OUT_SEED, _HELD_OUT, index)), min_words, max_words)
        if is_held_out(string.text, min_words):
            strings.setdefault(string.text, string)
        if len(strings) == count:
            return list(strings.values())
    raise DataError(f"data.validation_utterances is {count}, but only {len(strings)} held-out strings of {min_words} to {max_words} words "
                    "were found; lower it, or raise data.max_words")


def curriculum(step: int, steps: int, min_words: int, max_words: int) -> tuple[int, int]:
    """Fewest and most words of a training string at an optimizer step: the most grows from 1 to max_words over `steps`."""
    most = max_words if step >= steps else 1 + (max_words - 1) * step // steps
    return min(min_words, most), most


def _draw(rng: np.random.Generator, min_words: int, max_words: int) -> DigitString:
    count = int(rng.integers(min_words, max_words + 1))
    words = tuple(WORDS[i] for i in rng.integers(len(WORDS), size=count))
    speeds = rng.integers(len(SPEEDS), size=count)
    pauses = rng.integers(MAX_PAUSE_SAMPLES + 1, size=count - 1)
    return DigitString(words, tuple(speeds.tolist()), tuple(pauses.tolist()), float(10 ** (rng.uniform(*GAIN_DB) / 20)))


def count_samples(string: DigitString) -> int:
    """Length of a string's waveform."""
    return sum(len(waveforms()[key]) for key in _keys(string)) + sum(string.pauses)


def longest_samples(max_words: int) -> int:
    """Upper bound of the length of a string."""
    return max_words * max(map(len, waveforms().values())) + (max_words - 1) * MAX_PAUSE_SAMPLES


def string_cut(string: DigitString) -> Cut:
    """The utterance as a Lhotse cut, before its gain."""
    first, *others = (_cuts()[key] for key in _keys(string))
    cut: Cut = first
    for pause, other in zip(string.pauses, others, strict=True):
        if pause:
            cut = cut.pad(num_samples=cut.num_samples + pause)
        cut = cut.append(other)
    return cut


def render(string: DigitString) -> np.ndarray:
    """float32 waveform: what the cut's load_audio returns, times the gain, but from memory instead of through a decoder."""
    audio = np.zeros(count_samples(string), dtype=np.float32)
    cut = string_cut(string)
    for offset, track in [(track.offset, track.cut) for track in cut.tracks] if len(string.words) > 1 else [(0.0, cut)]:
        if isinstance(track, MonoCut):
            start, source = round(offset * SAMPLE_RATE), waveforms()[track.id]
            audio[start : start + len(source)] = source
    return audio * np.float32(string.gain)


def _keys(string: DigitString) -> list[str]:
    return [_key(word, speed) for word, speed in zip(string.words, string.speeds, strict=True)]


def _key(word: str, speed: int) -> str:
    return f"{word}-{speed}"


@cache
def waveforms() -> dict[str, np.ndarray]:
    """float32 samples of every word at every speed, by cut id; read once."""
    lines: Sequence[str] = (SPEECH / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    paths = {entry["text"]: SPEECH / entry["audio_filepath"] for entry in map(json.loads, lines)}
    sources = {}
    for word in WORDS:
        audio, rate = soundfile.read(paths[word], dtype="float32")
        for speed, (faster, slower) in enumerate(SPEEDS):
            sources[_key(word, speed)] = resample(audio, rate * faster, SAMPLE_RATE * slower)
    return sources


@cache
def _cuts() -> dict[str, MonoCut]:
    """The same as Lhotse cuts, their audio in memory and their word as supervision."""
    return {key: _memory_cut(key, audio) for key, audio in waveforms().items()}


def _memory_cut(key: str, audio: np.ndarray) -> MonoCut:
    buffer = io.BytesIO()
    soundfile.write(buffer, audio, SAMPLE_RATE, format="WAV", subtype="FLOAT")
    duration = len(audio) / SAMPLE_RATE
    source = AudioSource(type="memory", channels=[0], source=buffer.getvalue())
    recording = Recording(id=key, sources=[source], sampling_rate=SAMPLE_RATE, num_samples=len(audio), duration=duration)
    word = SupervisionSegment(id=key, recording_id=key, start=0.0, duration=duration, text=key.rsplit("-", 1)[0], language="en")
    return MonoCut(id=key, start=0.0, duration=duration, channel=0, recording=recording, supervisions=[word])
