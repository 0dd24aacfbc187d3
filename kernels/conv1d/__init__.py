"""Depthwise convolution along a packed row, causal or centred, whose taps never reach into another document."""

from collections.abc import Callable

from torch import Tensor

from kernels.conv1d.cpu import conv1d_shifted
from kernels.conv1d.reference import conv1d_reference

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Tensor, str | None, int], Tensor]] = {
    "reference": conv1d_reference, "shifted": conv1d_shifted}


def causal_conv1d(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, *, activation: str | None = "silu",
                  implementation: str = "auto") -> Tensor:
    """activation(bias + sum over taps w of weight[:, w] x[t - (W - 1 - w)]), where both rows are of the same document. [T, C]

    :param segments_T: document number of each row, non-decreasing
    :param activation: silu | None
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation of a causal convolution is 'silu' or None, not {activation!r}")
    run = IMPLEMENTATIONS["shifted" if implementation == "auto" else implementation]
    return run(x_TC, weight_CW, bias_C, segments_T, activation, 0)


def centred_conv1d(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, *, implementation: str = "auto") -> Tensor:
    """bias + sum over taps w of weight[:, w] x[t + w - W // 2], where both rows are of the same document; W is odd. [T, C]"""
    run = IMPLEMENTATIONS["shifted" if implementation == "auto" else implementation]
    return run(x_TC, weight_CW, bias_C, segments_T, None, weight_CW.shape[1] // 2)
