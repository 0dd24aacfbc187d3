"""Slots of the flat audio row, at any number a frame: where each is within its utterance, and which are real."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ragged import Layout
from model.context import Context


def spread(values_U: Tensor, rate: int, ctx: Context) -> Tensor:
    """[A * rate, ...]: each utterance's value at every slot of its place in the row, `rate` slots a frame; 0 beyond the last place."""
    zero = values_U.new_zeros((1, *values_U.shape[1:]))
    return torch.cat((values_U, zero))[ctx.audio_segments_A].repeat_interleave(rate, 0)


def slot_positions(rate: int, ctx: Context) -> Tensor:
    """[A * rate]: number of each slot within its utterance's place, `rate` slots an encoder frame."""
    within = torch.arange(rate, device=ctx.audio_positions_A.device)
    return (ctx.audio_positions_A[:, None] * rate + within).flatten()


def valid_slots(lengths_U: Tensor, rate: int, ctx: Context) -> Tensor:
    """bool [A * rate]: slots among the first lengths_U of their utterance, `rate` slots an encoder frame."""
    return slot_positions(rate, ctx) < spread(lengths_U, rate, ctx)


def bounds(ctx: Context) -> Tensor:
    """int64 [U + 1]: first frame of each utterance's place in the row, and the end of the last; unused utterances have none there."""
    utterances = torch.arange(len(ctx.audio_starts_U), device=ctx.audio_segments_A.device)
    return F.pad((ctx.audio_segments_A == utterances[:, None]).sum(1).cumsum(0), (1, 0))


def layout(ctx: Context) -> Layout:
    """Where the utterances' encoder frames are."""
    return Layout(ctx.audio_starts_U, ctx.audio_lengths_U, ctx.audio_segments_A, ctx.audio_positions_A, ctx.utterance_frames)
