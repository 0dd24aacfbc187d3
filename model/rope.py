"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate(x_TNH: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Rotate each pair (i, i + H/2) of every head by positions_T * theta^(-2i/H), angles in fp32 (Llama's half-split layout)."""
    half = x_TNH.shape[-1] // 2
    wide = torch.promote_types(x_TNH.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, device=x_TNH.device, dtype=wide) / half)
    angles = (positions_T.to(wide)[:, None] * frequencies)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = x_TNH.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TNH.dtype)
