"""Depthwise 3 x 3 convolution of stride 2 over (frames, bins) of a masked, optionally rectified image whose channels are innermost.

Even and odd rows and columns are taken apart, which makes every tap a product of whole arrays, backward too. Mask and rectifier
belong to the operation because their gradient follows from the one image that the convolution keeps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.inductor import stored

TAPS = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def depthwise_stride2(x_TFC: Tensor, real_T: Tensor, weight_C133: Tensor, bias_C: Tensor, *, rectify: bool,
                      implementation: str = "auto") -> Tensor:
    """[ceil(T / 2), ceil(F / 2), C]: output (t, f) is centred at input (2 t, 2 f), zeros beyond the edges and where real_T is false.

    :param x_TFC: [T, F, C], or [T, F, 1]: the same for all channels
    :param rectify: negative inputs count as zero
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    run = IMPLEMENTATIONS["phases" if implementation == "auto" else implementation]
    return run(x_TFC, real_T, weight_C133, bias_C, rectify)


def depthwise_stride2_reference(x_TFC: Tensor, real_T: Tensor, weight_C133: Tensor, bias_C: Tensor, rectify: bool) -> Tensor:
    """The library's convolution, channels first."""
    image = torch.where(real_T[:, None, None], torch.relu(x_TFC) if rectify else x_TFC, 0).expand(-1, -1, len(bias_C)).permute(2, 0, 1)
    return F.conv2d(image[None], weight_C133, bias_C, stride=2, padding=1, groups=len(bias_C))[0].permute(1, 2, 0)


def _depthwise_stride2_phases(x_TFC: Tensor, real_T: Tensor, weight_C133: Tensor, bias_C: Tensor, rectify: bool) -> Tensor:
    return _Phases.apply(x_TFC, real_T, weight_C133, bias_C, rectify)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]] = {
    "reference": depthwise_stride2_reference, "phases": _depthwise_stride2_phases}


class _Phases(torch.autograd.Function):
    """Tap -1 reads the odd row before, tap 0 the even row itself, tap 1 the odd row after; columns alike."""

    @staticmethod
    def forward(ctx: Any, x_TFC: Tensor, real_T: Tensor, weight_C133: Tensor, bias_C: Tensor, rectify: bool) -> Tensor:
        # Two rows and columns in front keep even ones even, one behind completes the last pair of an odd number.
        margins = (0, 0, 2, x_TFC.shape[1] % 2, 2, x_TFC.shape[0] % 2)
        image = F.pad(torch.where(real_T[:, None, None], torch.relu(x_TFC) if rectify else x_TFC, 0), margins)
        ctx.save_for_backward(image, real_T, weight_C133)
        ctx.rectify, ctx.shape = rectify, x_TFC.shape
        y = widen(bias_C)
        for tap, weight_C in zip(TAPS, _rows(weight_C133), strict=True):
            y = y + _read(image, *tap) * weight_C
        return y.to(x_TFC.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        image, real_T, weight_C133 = ctx.saved_tensors
        dy, (frames, bins, _) = widen(grad), ctx.shape
        dweight_KC = torch.stack([_sum(dy * _read(image, *tap)) for tap in TAPS])
        # An even row feeds tap 0 of its own output, an odd one tap 1 of its own and tap -1 of the next; columns alike.
        following = F.pad(dy, (0, 0, 0, 1, 0, 1))
        phases: dict[tuple[int, int], Any] = dict.fromkeys(((0, 0), (0, 1), (1, 0), (1, 1)), 0)
        for (i, j), weight_C in zip(TAPS, _rows(weight_C133), strict=True):
            shifted = following[int(i == -1) :, int(j == -1) :][: dy.shape[0], : dy.shape[1]]
            phases[i % 2, j % 2] = phases[i % 2, j % 2] + shifted * weight_C
        pairs = [torch.stack((phases[a, 0], phases[a, 1]), 2).flatten(1, 2) for a in (0, 1)]
        dx = torch.stack(pairs, 1).flatten(0, 1)[:frames, :bins]
        passed = image[2 : 2 + frames, 2 : 2 + bins] > 0 if ctx.rectify else real_T[:, None, None]
        dx = torch.where(passed, dx, 0).sum_to_size(ctx.shape)
        return (dx.to(grad.dtype), None, dweight_KC.T.reshape(weight_C133.shape).to(weight_C133.dtype),
                _sum(dy).to(weight_C133.dtype), None)


def _rows(weight_C133: Tensor) -> Tensor:
    """[9, C]: channels side by side, to be read as vectors."""
    return stored(widen(weight_C133).flatten(1).T)


def _read(image: Tensor, i: int, j: int) -> Tensor:
    """What tap (i, j) reads for every output."""
    rows, columns = image.shape[0] // 2 - 1, image.shape[1] // 2 - 1
    return widen(image[2 + i :: 2, 2 + j :: 2][:rows, :columns])


def _sum(x_TFC: Tensor) -> Tensor:
    """[C]; columns before rows, since a CPU adds up one long sum in several parts for accuracy, slowly."""
    return x_TFC.sum(1).sum(0)
