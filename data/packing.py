"""Utterances -> one flat row of tokens and one flat row of audio, with every index that the device needs; NumPy only.

The fields of a packed row are those of model.context.Context and of the step; their meaning is written there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from configs.schema import RowSize
from model.lengths import COUNTING, FRAME_SAMPLES

AUDIO = -1  # stands for an utterance's audio among its token ids
IGNORE = -100  # label of a slot that is not supervised


@dataclass(frozen=True)
class PackedTokens:
    """Utterances one after another in T slots; padding, where a multiple asks for it, ends each utterance."""

    tokens_T: np.ndarray  # int64, 0 at audio slots and padding
    labels_T: np.ndarray  # int64, the next token of the same utterance if that is supervised, else -100
    frames_T: np.ndarray  # int64, row of the flat encoder frames for audio slots, else -1
    segments_T: np.ndarray  # int32, utterance
    positions_T: np.ndarray  # int64, restart at 0 for each utterance
    cu_seqlens_U1: np.ndarray  # int32, boundaries, padding included
    lengths_U: np.ndarray  # int64, slots without padding

    @property
    def max_seqlen(self) -> int:
        """Longest utterance, padding included."""
        return int(np.diff(self.cu_seqlens_U1).max())


def pack_tokens(ids: Sequence[Sequence[int]], supervised: Sequence[Sequence[bool]], audio_frames: Sequence[Sequence[int]], *,
                audio_id: int = AUDIO, frame_starts: Sequence[Sequence[int]] | None = None, multiple: int = 1,
                total_multiple: int = 1, names: Sequence[str] | None = None) -> PackedTokens:
    """Replaces each `audio_id` by the frames of the next audio of that utterance and lays the utterances end to end.

    For utterance u: token ids[u], whether supervised[u] counts a token as a target, and the lengths audio_frames[u] of its audios, whose
    first frames are the rows frame_starts[u] of the flat encoder frames (default: all audios one after another).
    Each utterance is padded to `multiple` (2 * cp), then the last so that the total is one of `total_multiple` (tp).
    The loss mask alone decides what is supervised, whatever the ids: an end token that doubles as padding is a target like any other.
    """
    if frame_starts is None:
        frame_starts = _consecutive(audio_frames)
    names = names or [str(u) for u in range(len(ids))]
    parts = [_expand(np.array(ids[u], dtype=np.int64), np.array(supervised[u], dtype=bool), audio_frames[u], frame_starts[u],
                     audio_id, names[u]) for u in range(len(ids))]
    lengths = np.array([len(part.tokens) for part in parts], dtype=np.int64)
    padded = -(-lengths // multiple) * multiple
    padded[-1:] += -padded.sum() % math.lcm(multiple, total_multiple)
    return PackedTokens(
        tokens_T=_lay([part.tokens for part in parts], padded, 0),
        labels_T=_lay([part.labels for part in parts], padded, IGNORE),
        frames_T=_lay([part.frames for part in parts], padded, -1),
        segments_T=np.repeat(np.arange(len(parts), dtype=np.int32), padded),
        positions_T=_join([np.arange(length) for length in padded]),
        cu_seqlens_U1=np.concatenate([[0], np.cumsum(padded)]).astype(np.int32),
        lengths_U=lengths)


class _Expanded(NamedTuple):
    tokens: np.ndarray
    labels: np.ndarray
    frames: np.ndarray


def _expand(ids: np.ndarray, supervised: np.ndarray, lengths: Sequence[int], starts: Sequence[int], audio_id: int, name: str) -> _Expanded:
    """Tokens, shifted labels and frame rows of one utterance, its audio expanded."""
    is_audio = ids == audio_id
    if len(ids) == 0 or len(ids) != len(supervised):
        raise ValueError(f"utterance {name} has {len(ids)} tokens and a loss mask of {len(supervised)}; both must be one length, not 0")
    if is_audio.sum() != len(lengths):
        raise ValueError(f"utterance {name} has {is_audio.sum()} audio placeholders but {len(lengths)} audios; each needs its own")
    widths = np.ones(len(ids), dtype=np.int64)
    widths[is_audio] = lengths
    tokens = np.repeat(np.where(is_audio, 0, ids), widths)
    targets = np.repeat(np.where(supervised & ~is_audio, ids, IGNORE), widths)
    frames = np.full(len(tokens), -1, dtype=np.int64)
    frames[np.repeat(is_audio, widths)] = _join([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    return _Expanded(tokens, np.append(targets, IGNORE)[1:], frames)


def _consecutive(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """First row of each audio when all of them lie end to end."""
    counts = [len(utterance) for utterance in lengths]
    ends = np.cumsum([0, *(length for utterance in lengths for length in utterance)]).tolist()
    firsts = np.cumsum([0, *counts]).tolist()
    return [ends[first : first + count] for first, count in zip(firsts, counts, strict=False)]


def _lay(parts: Sequence[np.ndarray], padded: np.ndarray, fill: int) -> np.ndarray:
    return _join([_extend(part, length, fill) for part, length in zip(parts, padded, strict=True)])


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenation that also takes no part at all."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _extend(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=fill)


@dataclass(frozen=True)
class Example:
    """One utterance ready for packing."""

    id: str
    prompt: Sequence[int]  # token ids with AUDIO once
    answer: Sequence[int]  # token ids of the transcript; empty together with `end` leaves the prompt alone, for decoding
    end: Sequence[int]  # [eos], or nothing
    samples: np.ndarray = field(repr=False)  # float32


@dataclass(frozen=True)
class Load:
    """What utterances take of a row, in the units of RowSize."""

    tokens: int = 0
    audio_frames: int = 0
    utterances: int = 0
    utterance_frames: int = 0
    label_tokens: int = 0

    def __add__(self, other: "Load") -> "Load":
        """Load of both together."""
        return Load(self.tokens + other.tokens, self.audio_frames + other.audio_frames, self.utterances + other.utterances,
                    max(self.utterance_frames, other.utterance_frames), max(self.label_tokens, other.label_tokens))

    def excess(self, size: RowSize) -> str:
        """Which limits of the row this load breaks, as "tokens 90 > 80"; empty if it fits."""
        return ", ".join(f"{key} {value} > {getattr(size, key)}" for key, value in vars(self).items() if value > getattr(size, key))


def load_of(prompt_tokens: int, answer_tokens: int, samples: int, ends: int = 1, encoder: str = "fastconformer", multiple: int = 1,
            queries: int = 0) -> Load:
    """Load of one utterance: `prompt_tokens` with the audio placeholder if there is an encoder, transcript, `ends` end tokens, samples; its
    slots are a multiple of `multiple`.

    :param queries: audio tokens of any utterance, if its frames are not the audio tokens
    """
    counting = COUNTING[encoder]
    frames, placeholders = counting.tokens(samples), int(encoder != "none")
    tokens = prompt_tokens - placeholders + (queries or frames) + answer_tokens + ends
    return Load(-(-tokens // multiple) * multiple, counting.slots(samples), 1, frames, placeholders * answer_tokens)


def pack_row(utterances: Sequence[Example], size: RowSize, encoder: str = "fastconformer", multiple: int = 1,
             queries: int = 0) -> dict[str, np.ndarray]:
    """One row of static shape: T = size.tokens, U = size.utterances, A = size.audio_frames, S = 1280 A, L = size.label_tokens.

    Any number of utterances that fits, also none; each takes a multiple of `multiple` slots. The answer and the end token are supervised,
    nothing else.
    """
    loads = [load_of(len(u.prompt), len(u.answer), len(u.samples), len(u.end), encoder, multiple, queries) for u in utterances]
    total = sum(loads, Load())
    if excess := total.excess(size):
        raise ValueError(f"utterances {', '.join(u.id for u in utterances)} do not fit the row: {excess}")
    samples = np.array([len(u.samples) for u in utterances], dtype=np.int64)
    slots = np.array([COUNTING[encoder].slots(int(n)) for n in samples], dtype=np.int64)
    starts, frames = np.cumsum(slots) - slots, COUNTING[encoder].tokens(samples)
    one = np.s_[:, :0] if encoder == "none" else np.s_[:, :]  # audio an utterance, or none of a text
    numbers = np.arange(len(samples))
    tokens, firsts = (np.full_like(numbers, queries), numbers * queries) if queries else (frames, starts)  # where the audio tokens are
    return _token_fields(utterances, tokens[:, None][one], firsts[:, None][one], size, multiple) \
        | _audio_fields(utterances, samples, frames, slots, starts, size) | _ctc_fields([] if encoder == "none" else utterances, size)


def _token_fields(utterances: Sequence[Example], frames: np.ndarray, starts: np.ndarray, size: RowSize,
                  multiple: int) -> dict[str, np.ndarray]:
    row = pack_tokens(
        ids=[[*u.prompt, *u.answer, *u.end] for u in utterances],
        supervised=[[False] * len(u.prompt) + [True] * (len(u.answer) + len(u.end)) for u in utterances],
        audio_frames=frames.tolist(), frame_starts=starts.tolist(), multiple=multiple, names=[u.id for u in utterances])
    return {
        "tokens_T": _extend(row.tokens_T, size.tokens, 0), "labels_T": _extend(row.labels_T, size.tokens, IGNORE),
        "frames_T": _extend(row.frames_T, size.tokens, -1), "segments_T": _extend(row.segments_T, size.tokens, size.utterances),
        "positions_T": _extend(row.positions_T, size.tokens, 0),
        "cu_seqlens_U1": _extend(row.cu_seqlens_U1, size.utterances + 1, int(row.cu_seqlens_U1[-1]))}


def _audio_fields(utterances: Sequence[Example], samples: np.ndarray, frames: np.ndarray, slots: np.ndarray, starts: np.ndarray,
                  size: RowSize) -> dict[str, np.ndarray]:
    audio_S = np.zeros(size.audio_frames * FRAME_SAMPLES, dtype=np.float32)
    for start, utterance in zip(starts * FRAME_SAMPLES, utterances, strict=True):
        audio_S[start : start + len(utterance.samples)] = utterance.samples
    places = np.append(slots, size.audio_frames - slots.sum())  # what is beyond the last slot belongs to segment U
    owners = np.append(np.arange(len(slots)), size.utterances)
    return {
        "audio_S": audio_S, "audio_starts_U": _extend(starts, size.utterances, 0), "audio_samples_U": _extend(samples, size.utterances, 0),
        "audio_lengths_U": _extend(frames, size.utterances, 0), "audio_segments_A": np.repeat(owners, places),
        "audio_positions_A": np.concatenate([np.arange(place) for place in places])}


def _ctc_fields(utterances: Sequence[Example], size: RowSize) -> dict[str, np.ndarray]:
    labels_UL = np.zeros((size.utterances, size.label_tokens), dtype=np.int64)
    for u, utterance in enumerate(utterances):
        labels_UL[u, : len(utterance.answer)] = utterance.answer
    lengths = np.array([len(utterance.answer) for utterance in utterances], dtype=np.int64)
    return {"ctc_labels_UL": labels_UL, "ctc_lengths_U": _extend(lengths, size.utterances, 0)}
