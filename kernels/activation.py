"""Activations of experts and MLPs, computed in fp32 and rounded once.

relu2: max(h, 0)². swiglu: the rows of h are [gate, up], silu(gate) * up, half as wide as h.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("relu2", "swiglu")


def widen(x: Tensor) -> Tensor:
    """fp32 for 16-bit tensors; fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def expansion(activation: str) -> int:
    """Width of the pre-activation over that of the activation."""
    return {"relu2": 1, "swiglu": 2}[activation]


def activate(h: Tensor, activation: str) -> Tensor:
    """The activation of h [..., F or 2F], in h's dtype. [..., F]"""
    wide = widen(h)
    if activation == "relu2":
        return F.relu(wide).square().to(h.dtype)
    gate, up = wide.chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)
