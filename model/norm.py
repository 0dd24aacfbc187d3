"""Normalisations: statistics and weights in fp32 whatever the input's dtype, the result in the input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; the weight is multiplied before rounding to x.dtype."""
    wide = widen(x)
    return (wide * _inverse_rms(wide, eps) * widen(weight)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """RMSNorm of x * silu(gate), each of `groups` equal parts of the last dimension with its own statistic (Mamba-2)."""
    gated = widen(x) * F.silu(widen(gate))
    parts = gated.unflatten(-1, (groups, -1))
    return ((parts * _inverse_rms(parts, eps)).flatten(-2) * widen(weight)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension."""
    return F.layer_norm(widen(x), x.shape[-1:], widen(weight), widen(bias), eps).to(x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

