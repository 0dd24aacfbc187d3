"""Manifests: NeMo's JSON lines and Lhotse's cuts, told apart by what a line says and not by the file's name.

Every line is checked when the manifest is opened, so that a fault on the last one shows at once; only the file's bytes and the place of
each line stay in memory, and a line is parsed again when its utterance is needed.
"""

import gzip
import io
import json
import math
import os.path
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from lhotse.serialization import deserialize_item

from data.errors import DataError, UtteranceError, settle
from data.tokenizer import clean_text

_CUT_KEYS = {"recording", "supervisions", "tracks", "features"}  # at least one is in every Lhotse cut
_NEMO_KEYS = {"audio_filepath", "duration", "text", "offset", "lang"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an audio file, as a NeMo manifest gives it."""

    path: str
    offset_sec: float
    duration_sec: float


@dataclass(frozen=True, slots=True)
class Utterance:
    """One line of a manifest."""

    id: str  # unique within the manifest
    where: str  # file and line, for messages
    text: Any  # as given; clean_text decides whether it is text
    duration_sec: float
    audio: Any  # Segment, or a Lhotse cut
    lang: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # keys of the line that mean nothing here
    alone: bool = False  # a file that is all there is, and its own place

    def fault(self, reason: str, message: str) -> UtteranceError:
        """A fault of this utterance, with its place."""
        if self.alone:
            return UtteranceError(reason, message if message.startswith(self.where) else f"{self.where}: {message}", alone=True)
        return UtteranceError(reason, f"{self.where}: {message} (utterance {self.id})")


@dataclass(frozen=True)
class Manifest:
    """A sequence of utterances over the bytes of a file."""

    path: str
    blob: bytes
    text_only: bool  # lines of text without audio
    places: np.ndarray  # int64 [n, 3]: line number, first byte, last byte + 1
    repeated: frozenset[str]  # ids that several lines have

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Utterance:
        line, start, stop = (int(n) for n in self.places[index])
        return _parse(self.blob[start:stop], self.path, line, self.repeated, self.text_only)


def read_manifest(path: str | Path, on_bad_text: str = "fail", text_only: bool = False) -> Manifest:
    """The utterances of a manifest, plain or gzipped. Any malformed line is an error, and with on_bad_text=fail any bad text.

    :param text_only: a line, or a row of a parquet file, is {"text": ...}, or with it "prompt", what the text answers, and "id"
    """
    path = str(path)
    blob = _read(path, columns=text_only)
    places: list[tuple[int, int, int]] = []
    seen: set[str] = set()
    repeated: set[str] = set()
    start = 0
    for line, text in enumerate(io.BytesIO(blob), 1):
        stop = start + len(text)
        if text.strip():
            utterance = _parse(text, path, line, frozenset(), text_only)
            try:
                transcript(utterance)
            except UtteranceError as error:
                settle(error, on_bad_text)
            (repeated if utterance.id in seen else seen).add(utterance.id)
            places.append((line, start, stop))
        start = stop
    if not places:
        raise DataError(f"{path} has no lines; a manifest holds one JSON object a line")
    return Manifest(path, blob, text_only, np.array(places), frozenset(repeated))


def transcript(utterance: Utterance) -> str:
    """The clean text of an utterance; raises UtteranceError with its place."""
    try:
        return clean_text(utterance.text)
    except UtteranceError as error:
        raise utterance.fault(error.reason, str(error)) from error


def _read(path: str, columns: bool = False) -> bytes:
    """The lines of a file; with `columns` the rows of a parquet file are lines too."""
    try:
        if columns and path.endswith(".parquet"):
            return _read_rows(path)
        blob = Path(path).read_bytes()
        return gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob
    except FileNotFoundError as error:
        raise DataError(f"the manifest {path} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"the manifest {path} is a folder; name a file in it") from error
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"the manifest {path} cannot be read ({reason}); check the path") from error


def _read_rows(path: str) -> bytes:
    """The rows of a parquet file as lines of JSON."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise DataError(f"the manifest {path} is parquet, which needs pyarrow; type pip install pyarrow") from error
    try:
        return b"\n".join(json.dumps(row, default=str).encode() for row in read_table(path).to_pylist())
    except ArrowException as error:
        raise DataError(f"the manifest {path} cannot be read as parquet ({error}); write it again, or under another name") from error


def _parse(raw: bytes, path: str, line: int, repeated: frozenset[str], text_only: bool) -> Utterance:
    where = f"line {line} of {path}"
    try:
        entry = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); a manifest holds one JSON object a line") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {type(entry).__name__}, not a JSON object; a manifest holds one JSON object a line")
    if text_only:
        return _parse_text(entry, where, line)
    is_cut = "audio_filepath" not in entry and bool(_CUT_KEYS & set(entry))
    utterance = _parse_cut(entry, where) if is_cut else _parse_nemo(entry, path, where)
    return replace(utterance, id=f"{utterance.id}#{line}") if utterance.id in repeated else utterance


def _parse_text(entry: dict[str, Any], where: str, line: int) -> Utterance:
    """An utterance of no sound; its id always names its line."""
    if "text" not in entry:
        raise DataError(f"{where}: no text (has: {', '.join(sorted(entry)) or 'no key'}); add it")
    prompt = entry.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise DataError(f"{where}: prompt is {prompt!r}, not a string")
    return Utterance(f"{entry.get('id') or 'text'}#{line}", where, entry["text"], 0.0, None, extra={"prompt": prompt})


def _parse_nemo(entry: dict[str, Any], path: str, where: str) -> Utterance:
    for key in ("audio_filepath", "duration", "text"):
        if key not in entry:
            raise DataError(f"{where}: no {key} (has: {', '.join(sorted(entry)) or 'no key'}); add it")
    name = entry["audio_filepath"]
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}: audio_filepath is {name!r}; give the path of an audio file")
    duration = _seconds(entry, "duration", where)
    offset = _seconds(entry, "offset", where) if entry.get("offset") is not None else 0.0
    given = entry.get("id")
    lang = entry.get("lang")
    return Utterance(
        id=given if isinstance(given, str) and given else os.path.splitext(os.path.basename(name))[0],
        where=where, text=entry["text"], duration_sec=duration, audio=Segment(os.path.join(os.path.dirname(path), name), offset, duration),
        lang=lang if isinstance(lang, str) else None, extra={key: value for key, value in entry.items() if key not in _NEMO_KEYS})


def _seconds(entry: dict[str, Any], key: str, where: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise DataError(f"{where}: {key} is {value!r}; give seconds, a number that is not negative")
    return float(value)


def _parse_cut(entry: dict[str, Any], where: str) -> Utterance:
    try:
        cut = deserialize_item(entry)
        parts = sorted(cut.supervisions, key=lambda supervision: supervision.start)
        texts = [part.text for part in parts]
        duration = _seconds({"duration": cut.duration}, "duration", where)
    except Exception as error:  # whatever Lhotse meets in a malformed line
        raise DataError(f"{where} is not a Lhotse cut ({type(error).__name__}: {error}); write it with CutSet.to_file") from error
    if not cut.has_recording:
        raise DataError(f"{where}: cut {cut.id} has no recording; features alone cannot be used")
    text = " ".join(texts) if texts and all(isinstance(text, str) for text in texts) else None
    lang = parts[0].language if parts else None
    return Utterance(cut.id, where, text, duration, cut, lang, {})
