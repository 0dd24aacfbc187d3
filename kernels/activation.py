"""Activations of experts and MLPs, computed in fp32 and rounded once, and their derivatives for operators with their own backward.

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
    return activate_wide(widen(h), activation).to(h.dtype)


def activate_wide(h: Tensor, activation: str) -> Tensor:
    """The same, of an h that is wide already."""
    if activation == "relu2":
        return F.relu(h).square()
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def activate_backward(h: Tensor, grad: Tensor, activation: str) -> Tensor:
    """Gradient of h [..., F or 2F] from that of the activation [..., F]; both wide."""
    if activation == "relu2":
        return F.relu(h).mul_(grad).mul_(2)
    gate, up = h.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], -1)
