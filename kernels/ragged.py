"""Utterances of a flat row side by side, and back: [A, ...] <-> [U, L, ...].

Utterance u owns the flat frames starts_U[u] : + lengths_U[u]; segments_A and positions_A say for each flat frame which utterance's
place it is in (U beyond the last) and how far within it. Both directions are gathers, also backward: no scatter, no atomics.
"""

from typing import Any

import torch
from torch import Tensor


def pad(x_A: Tensor, starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor, frames: int) -> Tensor:
    """[A, ...] -> [U, frames, ...], zeros beyond each utterance's length."""
    padded, flat = _padded(starts_U, lengths_U, segments_A, frames), _flat(lengths_U, segments_A, positions_A, frames)
    return _Gather.apply(x_A, *padded, *flat).unflatten(0, (-1, frames))


def unpad(x_UL: Tensor, starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor) -> Tensor:
    """[U, frames, ...] -> [A, ...], zeros outside utterances; the inverse of pad."""
    frames = x_UL.shape[1]
    padded, flat = _padded(starts_U, lengths_U, segments_A, frames), _flat(lengths_U, segments_A, positions_A, frames)
    return _Gather.apply(x_UL.flatten(0, 1), *flat, *padded)


def _padded(starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Flat frame of each padded slot [U * frames], and whether there is one."""
    position = torch.arange(frames, device=starts_U.device)
    frame = (starts_U[:, None] + position).clamp(max=segments_A.shape[0] - 1)
    return frame.flatten(), (position < lengths_U[:, None]).flatten()


def _flat(lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Padded slot of each flat frame [A], and whether there is one."""
    utterance = segments_A.clamp(max=lengths_U.shape[0] - 1)
    exists = (segments_A < lengths_U.shape[0]) & (positions_A < lengths_U[utterance])
    return utterance * frames + positions_A.clamp(max=frames - 1), exists


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
