"""Utterances of a flat row side by side, and back: [A, ...] <-> [U, L, ...].

Both directions are gathers, also backward: no scatter, no atomics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the utterances of a flat row are: utterance u owns the frames starts_U[u] : + lengths_U[u]."""

    starts_U: Tensor
    lengths_U: Tensor  # 0: unused
    segments_A: Tensor  # the utterance in whose place a frame is, U beyond the last
    positions_A: Tensor  # number of the frame within that place
    frames: int  # L; no utterance is longer


def pad(x_A: Tensor, layout: Layout) -> Tensor:
    """[A, ...] -> [U, L, ...], zeros beyond each utterance's length."""
    return _Gather.apply(x_A, *_padded(layout), *_flat(layout)).unflatten(0, (-1, layout.frames))


def unpad(x_UL: Tensor, layout: Layout) -> Tensor:
    """[U, L, ...] -> [A, ...], zeros outside utterances; the inverse of pad."""
    return _Gather.apply(x_UL.flatten(0, 1), *_flat(layout), *_padded(layout))


def _padded(layout: Layout) -> tuple[Tensor, Tensor]:
    """Flat frame of each padded slot [U * L], and whether there is one."""
    position = torch.arange(layout.frames, device=layout.starts_U.device)
    frame = (layout.starts_U[:, None] + position).clamp(max=layout.segments_A.shape[0] - 1)
    return frame.flatten(), (position < layout.lengths_U[:, None]).flatten()


def _flat(layout: Layout) -> tuple[Tensor, Tensor]:
    """Padded slot of each flat frame [A], and whether there is one."""
    utterances = layout.lengths_U.shape[0]
    utterance = layout.segments_A.clamp(max=utterances - 1)
    exists = (layout.segments_A < utterances) & (layout.positions_A < layout.lengths_U[utterance])
    return utterance * layout.frames + layout.positions_A.clamp(max=layout.frames - 1), exists


class _Gather(torch.autograd.Function):
    """x[index] where `exists`, else 0; the existing part is one to one, so the gradient is such a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, exists: Tensor, back: Tensor, back_exists: Tensor) -> Tensor:
        ctx.save_for_backward(back, back_exists)
        return _take(x, index, exists)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _take(grad, *ctx.saved_tensors), None, None, None, None


def _take(x: Tensor, index: Tensor, exists: Tensor) -> Tensor:
    return torch.where(exists.reshape(-1, *(1,) * (x.ndim - 1)), x[index], 0)
