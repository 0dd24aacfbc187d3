"""Reads the file of a sentencepiece model (tokenizer.model) as a tokenizer of the tokenizers library, without sentencepiece itself."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

SPACE = "\u2581"  # stands for one in a piece
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of a piece


class Piece(NamedTuple):
    """An entry of the vocabulary, whose place in it is its id."""

    text: str
    score: float
    type: int


def read(path: Path) -> Tokenizer:
    """The tokenizer; raises ValueError for a file that is none, or of a kind that is not served."""
    try:
        content = _message(path.read_bytes())
        pieces = [_piece(_message(raw)) for raw in content[1]]
        trainer, normalizer = _message(content[2][0]), _message(content[3][0])
        kind = _first(trainer, 3, UNIGRAM)
    except (KeyError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError("it is no sentencepiece model") from error
    if kind not in (UNIGRAM, BPE):
        raise ValueError("it splits into words or characters; unigram and BPE are served")
    bytes_too = bool(_first(trainer, 35, 0))
    tokenizer = Tokenizer(_unigram(pieces, bytes_too) if kind == UNIGRAM else _bpe(pieces, bytes_too))
    prefix, tidy = bool(_first(normalizer, 3, 1)), bool(_first(normalizer, 4, 1))
    steps: list[Any] = [normalizers.Precompiled(table)] if (table := _first(normalizer, 2, b"")) else []
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()] if tidy else []
    steps += [normalizers.Prepend(" ")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    tokenizer.add_special_tokens([AddedToken(p.text, special=True, normalized=False) for p in pieces if p.type in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(p.text, normalized=False) for p in pieces if p.type == USER_DEFINED])
    return tokenizer


def _unigram(pieces: list[Piece], bytes_too: bool) -> models.Unigram:
    return models.Unigram([(p.text, p.score) for p in pieces], _unknown(pieces), bytes_too)


def _bpe(pieces: list[Piece], bytes_too: bool) -> models.BPE:
    """A pair is merged the earlier, the better the score of what it becomes."""
    ids = {p.text: i for i, p in enumerate(pieces)}
    merges = []
    for p in pieces:
        splits = [(p.text[:i], p.text[i:]) for i in range(1, len(p.text))] if p.type == NORMAL else []
        found = [split for split in splits if split[0] in ids and split[1] in ids]
        merges += [(-p.score, ids[left], ids[right], (left, right)) for left, right in found]
    ordered = [merge[-1] for merge in sorted(merges)]
    return models.BPE(ids, ordered, unk_token=pieces[_unknown(pieces)].text, fuse_unk=True, byte_fallback=bytes_too)


def _unknown(pieces: list[Piece]) -> int:
    return next(i for i, p in enumerate(pieces) if p.type == UNKNOWN)


def _piece(message: dict[int, list[Any]]) -> Piece:
    return Piece(message[1][0].decode(), struct.unpack("<f", message[2][0])[0] if 2 in message else 0.0, _first(message, 3, NORMAL))


def _first(message: dict[int, list[Any]], number: int, missing: Any) -> Any:
    return message.get(number, [missing])[0]


def _message(blob: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number: integers, or bytes."""
    found: dict[int, list[Any]] = {}
    for number, value in _fields(blob):
        found.setdefault(number, []).append(value)
    return found


def _fields(blob: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(blob):
        tag, at = _varint(blob, at)
        if tag & 7 == 0:
            value, at = _varint(blob, at)
            yield tag >> 3, value
            continue
        if tag & 7 not in (1, 2, 5):
            raise KeyError(tag)
        length, at = _varint(blob, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
        yield tag >> 3, blob[at : at + length]
        at += length


def _varint(blob: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first, and where it ends."""
    value, shift = 0, 0
    while True:
        byte = blob[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
