"""A flat audio row and its Context from a list of waveforms, and each utterance out of it, for tests of the speech encoder."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import DecoderConfig, EncoderConfig
from model.context import Context
from model.lengths import COUNTING, FRAME_SAMPLES, mel_frames


def audio_row(waves: Sequence[Tensor], encoder: EncoderConfig, *, gaps: Sequence[int] = (), unused: int = 0, tail: int = 0,
              utterance_frames: int = 0, **fields: Any) -> tuple[Tensor, Context]:
    """Samples [1280 * A] and the Context of the waveforms one after another.

    `gaps` are additional empty frames after each utterance's place, `unused` empty utterances at the end of the list, `tail` frames
    beyond the last place; `utterance_frames` defaults to the longest utterance; `fields` go to the Context.
    """
    gaps = list(gaps) or [0] * len(waves)
    counting = COUNTING[encoder.kind]
    places = [counting.slots(len(wave)) + gap for wave, gap in zip(waves, gaps, strict=True)]
    starts = [sum(places[:u]) for u in range(len(waves))]
    total = sum(places) + tail
    audio_S = torch.zeros(total * FRAME_SAMPLES, dtype=waves[0].dtype)
    for start, wave in zip(starts, waves, strict=True):
        audio_S[start * FRAME_SAMPLES : start * FRAME_SAMPLES + len(wave)] = wave
    count = len(waves) + unused
    segments = [u for u, place in enumerate(places) for _ in range(place)] + [count] * tail
    positions = [frame for place in [*places, tail] for frame in range(place)]
    samples = [len(wave) for wave in waves] + [0] * unused
    lengths = [counting.tokens(n) for n in samples]
    return audio_S, Context(
        encoder=encoder, decoder=DecoderConfig(),
        cu_seqlens_U1=torch.zeros(count + 1, dtype=torch.int32), segments_T=torch.zeros(0, dtype=torch.int32),
        positions_T=torch.zeros(0, dtype=torch.int64),
        audio_starts_U=torch.tensor(starts + [0] * unused), audio_samples_U=torch.tensor(samples), audio_lengths_U=torch.tensor(lengths),
        audio_segments_A=torch.tensor(segments), audio_positions_A=torch.tensor(positions),
        utterance_frames=utterance_frames or max(max(lengths), 1), **fields)


def cut_mel(mel: Tensor, ctx: Context) -> list[Tensor]:
    """The valid log-mel frames of each utterance; asserts zeros everywhere else."""
    rest = mel.clone()
    out = []
    for start, samples in zip(ctx.audio_starts_U.tolist(), ctx.audio_samples_U.tolist(), strict=True):
        own = slice(8 * start, 8 * start + mel_frames(samples))
        out.append(mel[own])
        rest[own] = 0
    assert not rest.any()
    return out


def cut(x_AD: Tensor, ctx: Context) -> list[Tensor]:
    """The valid encoder frames of each utterance."""
    return [x_AD[start : start + n] for start, n in zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True)]
