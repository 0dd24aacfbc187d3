"""Normalisations: statistics and weights in fp32 whatever the input's dtype, the result in the input's dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.activation import widen
from kernels.inductor import stored, sum_rows
from model.params import P, Tree


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; the weight is multiplied before rounding to x.dtype."""
    wide = widen(x)
    return (wide * _inverse_rms(wide, eps) * widen(weight)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """RMSNorm of x * silu(gate), each of `groups` equal parts of the last dimension with its own statistic (Mamba-2)."""
    return _GatedRMSNorm.apply(x, gate, weight, eps, groups)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension."""
    return F.layer_norm(widen(x), x.shape[-1:], widen(weight), widen(bias), eps).to(x.dtype)


def layer_norm_spec(width: int, axis: str = "embed") -> Tree:
    """Weight and bias of a layer norm."""
    return {"weight": P((width,), (axis,), "ones"), "bias": P((width,), (axis,), "zeros")}


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def residual_norms(cfg: DecoderConfig) -> Tree:
    """Weights of a decoder layer's norms: of its input, and of what it adds to it where the model has post norms."""
    norm = P((cfg.d_model,), ("embed",), "ones")
    return {"norm": norm, "post_norm": norm} if cfg.post_norm else {"norm": norm}


def add(w: Tree, x_TD: Tensor, branch_TD: Tensor, cfg: DecoderConfig) -> Tensor:
    """x + branch, or x + norm(branch)."""
    return x_TD + (rms_norm(branch_TD, w["post_norm"], cfg.norm_eps) if cfg.post_norm else branch_TD)


class _GatedRMSNorm(torch.autograd.Function):
    """Keeps its inputs in their own dtype and stores the gradient of x, which the scan's backward reads several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
        gated = (widen(x) * F.silu(widen(gate))).unflatten(-1, (groups, -1))
        inverse = _inverse_rms(gated, eps)
        ctx.save_for_backward(x, gate, weight, inverse)
        return ((gated * inverse).flatten(-2) * widen(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, weight, inverse = ctx.saved_tensors
        wide_x, wide_gate, grad = widen(x), widen(gate), widen(grad)
        sigmoid = torch.sigmoid(wide_gate)
        gated = (wide_x * wide_gate * sigmoid).unflatten(-1, (*inverse.shape[-2:-1], -1))
        dnormed = (grad * widen(weight)).view_as(gated)
        dgated = (inverse * dnormed - inverse**3 * gated * (dnormed * gated).mean(-1, keepdim=True)).flatten(-2)
        dgate = dgated * wide_x * sigmoid * (1 + wide_gate * (1 - sigmoid))
        dweight = sum_rows((grad * (gated * inverse).flatten(-2)).flatten(0, -2))
        return stored((dgated * wide_gate * sigmoid).to(x.dtype)), dgate.to(gate.dtype), dweight.to(weight.dtype), None, None
