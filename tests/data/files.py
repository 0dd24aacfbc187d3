"""Small audio files, manifests and configurations for the tests of data/."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from configs.schema import DataConfig, RowSize
from data.digits import SPEECH

RATE = 16000
TOKENIZER = str(SPEECH / "tokenizer.json")

MOST_BATCHES = 2000  # of the epochs that a test looks at


def noise(samples: int, seed: int = 0, channels: int = 1) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal((samples, channels))).astype(np.float32)


def write_audio(path: Path, samples: np.ndarray, rate: int = RATE, **options: Any) -> Path:
    soundfile.write(path, samples, rate, **options)
    return path


def write_lines(path: Path, entries: list[Any]) -> Path:
    """One JSON object a line; a string is written as it is."""
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries), encoding="utf-8")
    return path


def speech_manifest(folder: Path, count: int, seed: int = 0) -> Path:
    """`count` lines of 0.1 to 0.8 s, all out of one file of noise, each with its own text and id."""
    rng = np.random.default_rng(seed)
    write_audio(folder / "long.wav", noise(3 * RATE))
    return write_lines(folder / "train.jsonl", [
        {"audio_filepath": "long.wav", "offset": round(float(rng.uniform(0, 2)), 3), "duration": round(float(rng.uniform(0.1, 0.8)), 3),
         "text": " ".join(["word"] * int(rng.integers(1, 4))) + f" {i}", "id": f"utt-{i}"} for i in range(count)])


def config(manifest: Path | None = None, **changes: Any) -> DataConfig:
    """Rows small enough that a few utterances fill them; everything in this process."""
    rows = [RowSize(tokens=40, audio_frames=24, utterances=2, utterance_frames=12, label_tokens=20),
            RowSize(tokens=100, audio_frames=60, utterances=5, utterance_frames=12, label_tokens=24)]
    values: dict[str, Any] = {"manifest": str(manifest), "tokenizer": TOKENIZER, "rows": rows, "workers": 0}
    return DataConfig(**(values | changes))


def digit_config(**changes: Any) -> DataConfig:
    rows = [RowSize(tokens=450, audio_frames=330, utterances=5, utterance_frames=144, label_tokens=72)]
    values: dict[str, Any] = {"kind": "digits", "tokenizer": TOKENIZER, "rows": rows, "workers": 0, "validation_utterances": 20}
    return DataConfig(**(values | changes))


def epochs(loader: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Batches of the first `count` epochs, of which there are few."""
    batches = list(itertools.takewhile(lambda batch: batch["state"]["epoch"] < count, itertools.islice(loader, MOST_BATCHES)))
    assert len(batches) < MOST_BATCHES, "an epoch that does not end"
    return batches


def ids(batches: Iterable[dict[str, Any]]) -> list[str]:
    return [name for batch in batches for name in batch["ids"]]
