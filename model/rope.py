"""Rotary position embedding."""

import math

import torch
from torch import Tensor

from configs.schema import RopeScaling
from kernels.inductor import stored

UNSCALED = RopeScaling()
BY_LENGTH = ("dynamic", "longrope")  # whose frequencies depend on how long a document is


def rotate(x_TNH: Tensor, positions_T: Tensor, theta: float, fraction: float = 1.0, scaling: RopeScaling = UNSCALED,
           lengths_T: Tensor | None = None) -> Tensor:
    """Turn the first `fraction` of every head: pair (i, i + R/2) of its R numbers by positions_T * theta^(-2i/R), slowed by `scaling`.

    Angles are in fp32 (Llama's half-split layout).

    :param lengths_T: tokens of the document of each slot, which BY_LENGTH needs
    """
    rotated = int(x_TNH.shape[-1] * fraction)
    wide = torch.promote_types(x_TNH.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(rotated // 2, device=x_TNH.device, dtype=wide) / (rotated // 2))
    if scaling.kind in BY_LENGTH:
        assert lengths_T is not None
        frequencies = _of_length(frequencies, lengths_T.to(wide)[:, None], scaling)
    else:
        frequencies = _slowed(frequencies, theta, scaling)
    angles = (positions_T.to(wide)[:, None] * frequencies)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    if scaling.kind in ("yarn", "longrope"):
        factor = _attention_factor(scaling)
        cos, sin = cos * factor, sin * factor
    cos, sin = stored(cos), stored(sin)  # else the compiler computes them anew for each head
    first, second = x_TNH[..., :rotated].to(wide).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TNH.dtype)
    return turned if rotated == x_TNH.shape[-1] else torch.cat((turned, x_TNH[..., rotated:]), dim=-1)


def _slowed(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """The frequencies, each kept (share 1), divided by the factor (share 0) or between the two."""
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":  # shares linear in the turns within the trained length
        turns = frequencies * (scaling.trained_positions / (2 * math.pi))
        kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    else:  # yarn: linear in the number of the frequency
        last = 2 * len(frequencies) - 1
        low, high = (_number(beta, len(frequencies), theta, scaling) for beta in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, last)
        numbers = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
        kept = 1 - (numbers - low) / max(high - low, 0.001)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _of_length(frequencies: Tensor, length_T1: Tensor, scaling: RopeScaling) -> Tensor:
    """The frequencies for documents of these lengths. [T, R/2]"""
    if scaling.kind == "longrope":
        long, short = (frequencies / frequencies.new_tensor(factors) for factors in (scaling.long_factors, scaling.short_factors))
        return torch.where(length_T1 > scaling.trained_positions, long, short)
    half = len(frequencies)  # dynamic: a base that grows with the length (NTK)
    grown_T1 = scaling.factor * (length_T1 / scaling.trained_positions).clamp(min=1) - (scaling.factor - 1)
    numbers = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
    return frequencies * grown_T1 ** (-numbers / (half - 1))


def _attention_factor(scaling: RopeScaling) -> float:
    """What rotated queries and keys are multiplied by."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.trained_positions))


def _number(turns: float, half: int, theta: float, scaling: RopeScaling) -> float:
    """Number of the frequency that makes that many turns within the trained length."""
    return half * math.log(scaling.trained_positions / (turns * 2 * math.pi)) / math.log(theta)
