"""Depthwise convolution along a packed row, causal or centred, whose taps never reach into another document."""

import importlib.util
from collections.abc import Callable

from torch import Tensor

from kernels import launch
from kernels.conv1d.adapters import conv1d_causal_conv1d
from kernels.conv1d.cpu import conv1d_shifted
from kernels.conv1d.reference import conv1d_reference
from kernels.segments import documents

Convolution = Callable[[Tensor, Tensor, Tensor | None, Tensor, str | None, int], Tensor]


def causal_conv1d(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, *, activation: str | None = "silu",
                  implementation: str = "auto") -> Tensor:
    """activation(bias + sum over taps w of weight[:, w] x[t - (W - 1 - w)]), where both rows are of the same document. [T, C]

    :param segments_T: document number of each row; every run of equal numbers is a document
    :param activation: silu | None
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation of a causal convolution is 'silu' or None, not {activation!r}")
    return _convolve(x_TC, weight_CW, bias_C, segments_T, activation, 0, implementation)


def centred_conv1d(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, *, implementation: str = "auto") -> Tensor:
    """bias + sum over taps w of weight[:, w] x[t + w - W // 2], where both rows are of the same document; W is odd. [T, C]"""
    return _convolve(x_TC, weight_CW, bias_C, segments_T, None, weight_CW.shape[1] // 2, implementation)


def _shifted(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None, ahead: int) -> Tensor:
    return conv1d_shifted(x_TC, weight_CW, bias_C, documents(segments_T), activation, ahead)


IMPLEMENTATIONS: dict[str, Convolution] = {"reference": conv1d_reference, "shifted": _shifted, "causal_conv1d": conv1d_causal_conv1d}
if importlib.util.find_spec("triton"):
    from kernels.conv1d.triton import conv1d_triton

    IMPLEMENTATIONS["triton"] = conv1d_triton


def _convolve(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segments_T: Tensor, activation: str | None, ahead: int,
              implementation: str) -> Tensor:
    if implementation == "auto":
        implementation = "triton" if launch.serves(x_TC, IMPLEMENTATIONS) else "shifted"
    if not len(x_TC):
        return x_TC.clone()
    return IMPLEMENTATIONS[implementation](x_TC, weight_CW, bias_C, segments_T, activation, ahead)
