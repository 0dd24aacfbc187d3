"""Projections of layers: a dense product, with a low-rank update where the matrix has one."""

import torch
from torch import Tensor

from kernels import linear as kernel
from kernels.activation import widen
from model import lora
from model.context import Context


def linear(x: Tensor, weight: "Tensor | lora.Adapted", bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias for x [..., I].

    An adapted matrix adds scale (drop(x) aᵀ) bᵀ; DoRA then gives each row of the product the length that it learns, a length whose own
    dependence on a and b gets no gradient.
    """
    if isinstance(weight, Tensor):
        return kernel.linear(x, weight, bias)
    low = kernel.linear(kernel.linear(_dropped(x, weight), weight.a), weight.b)
    y = kernel.linear(x, weight.weight) + weight.scale * low
    if weight.magnitude is not None:
        y = y * _lengthening(weight, weight.magnitude).to(y.dtype)
    return y if bias is None else y + bias


def _lengthening(w: "lora.Adapted", magnitude: Tensor) -> Tensor:
    """Wanted over actual length of each row. [O]"""
    with torch.no_grad():
        actual = lora.row_lengths(widen(w.weight) + w.scale * (widen(w.b) @ widen(w.a)))
        frozen = lora.row_lengths(w.weight)
    return (1 + widen(magnitude)) * (frozen / actual)


def _dropped(x: Tensor, w: "lora.Adapted") -> Tensor:
    if not w.dropout:
        return x
    assert w.salt is not None
    assert w.ctx is not None
    keep = uniform(w.salt, w.ctx, x.shape[0], x.shape[1]) >= w.dropout
    return torch.where(keep, x / (1 - w.dropout), 0)


def uniform(salt: Tensor, ctx: Context, rows: int, columns: int) -> Tensor:
    """fp32 [rows, columns] in [0, 1), a pure function of the salt (run seed and path), the row of the step and the place in it.

    The place is (utterance, position), so that it does not matter how a row is split over processes; of anything but the token row and the
    audio row it is the number of the row.
    """
    assert ctx.draw is not None
    if rows == len(ctx.segments_T):
        place = ctx.segments_T * 65537 + ctx.positions_T
    elif rows == len(ctx.audio_segments_A):
        place = ctx.audio_segments_A * 65537 + ctx.audio_positions_A
    else:
        place = torch.arange(rows, device=salt.device)
    row = _mixed(_mixed(place.long() ^ salt.long()) ^ _mixed(ctx.draw + 1))
    bits = _mixed(row[:, None] ^ _mixed(torch.arange(columns, device=salt.device) + 1))
    return (bits >> 8).float() * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    """Numbers of 32 bits, each bit of which depends on all of x's lowest 32; int64, without overflow."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
