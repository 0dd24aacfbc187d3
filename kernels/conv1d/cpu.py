"""The convolution as a sum of shifted rows, which Inductor turns into a few passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.inductor import stored, sum_rows


def conv1d_shifted(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None,
                   ahead: int) -> Tensor:
    bias_C = weight_CW.new_zeros(len(weight_CW)) if bias_C is None else bias_C
    return _Shifted.apply(x_TC, weight_CW, bias_C, segments_T, activation, ahead)


class _Shifted(torch.autograd.Function):
    """Sum of shifted rows, compiled to one pass forward and two backward; the backward computes the convolution again."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor, segments_T: Tensor, activation: str | None,
                ahead: int) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW, bias_C, segments_T)
        ctx.activation, ctx.ahead = activation, ahead
        z_TC = _sum_taps(_taps(x_TC, segments_T, weight_CW.shape[1], ahead), _contiguous_taps(weight_CW)) + widen(bias_C)
        return stored((F.silu(z_TC) if activation == "silu" else z_TC).to(x_TC.dtype))

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> Any:
        x_TC, weight_CW, bias_C, segments_T = ctx.saved_tensors
        weight_WC, width = _contiguous_taps(weight_CW), weight_CW.shape[1]
        taps = _taps(x_TC, segments_T, width, ctx.ahead)
        dz_TC = widen(grad_TC)
        if ctx.activation == "silu":
            z_TC = _sum_taps(taps, weight_WC) + widen(bias_C)
            sigmoid = torch.sigmoid(z_TC)
            dz_TC = dz_TC * sigmoid * (1 + z_TC * (1 - sigmoid))
        dweight_CW = torch.stack([sum_rows(dz_TC * tap_TC) for tap_TC in taps], 1)
        dbias_C = sum_rows(dz_TC)
        dz_TC = stored(dz_TC)
        dx_TC = _sum_taps([_shifted(dz_TC, segments_T, w - width + 1 + ctx.ahead) for w in range(width)], weight_WC)
        return dx_TC.to(x_TC.dtype), dweight_CW.to(weight_CW.dtype), dbias_C.to(bias_C.dtype), None, None, None


def _contiguous_taps(weight_CW: Tensor) -> Tensor:
    """[W, C]: channels side by side, to be read as vectors."""
    return stored(widen(weight_CW).T)


def _taps(x_TC: Tensor, segments_T: Tensor, width: int, ahead: int) -> list[Tensor]:
    """What each tap reads, the earliest row first."""
    return [_shifted(widen(x_TC), segments_T, width - 1 - w - ahead) for w in range(width)]


def _sum_taps(taps: list[Tensor], weight_WC: Tensor) -> Tensor:
    total_TC = taps[0] * weight_WC[0]
    for tap_TC, weight_C in zip(taps[1:], weight_WC[1:], strict=True):
        total_TC = total_TC + tap_TC * weight_C
    return total_TC


def _shifted(x_TC: Tensor, segments_T: Tensor, rows: int) -> Tensor:
    """x[t - rows], zero where that is no row of the same document."""
    if rows == 0:
        return x_TC
    here = torch.arange(len(x_TC), device=x_TC.device)
    there = (here - rows).clamp(0, len(x_TC) - 1)
    same = (there == here - rows) & (segments_T[there] == segments_T)
    return torch.where(same[:, None], x_TC[there], 0)

