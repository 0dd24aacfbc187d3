"""Depthwise convolution of stride 2: the reference against sums over taps, the fast version against the reference in every gradient."""

import pytest
import torch
from torch import Tensor

from kernels.depthwise_stride2 import IMPLEMENTATIONS, depthwise_stride2

FAST = [name for name in IMPLEMENTATIONS if name != "reference"]
NAMES = ("y", "x", "weight", "bias")
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3}
CHANNELS = 5


def inputs(frames: int, bins: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, real, weight, bias of values that bf16 holds exactly."""
    x, weight, bias = (torch.randn(shape).bfloat16().double() for shape in ((frames, bins, channels), (CHANNELS, 1, 3, 3), (CHANNELS,)))
    return x, torch.rand(frames) < 0.7, weight, bias


def results(implementation, arguments, rectify, probe, dtype) -> dict[str, Tensor]:
    x, real, weight, bias = arguments
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    y = depthwise_stride2(leaves[0], real, *leaves[1:], rectify=rectify, implementation=implementation)
    assert y.dtype == dtype
    return dict(zip(NAMES, (y, *torch.autograd.grad((y * probe.to(dtype)).sum(), leaves)), strict=True))


@pytest.mark.parametrize("rectify", [False, True])
def test_reference_is_the_sum_over_taps(rectify):
    x, real, weight, bias = inputs(7, 6, CHANNELS)
    y = depthwise_stride2(x, real, weight, bias, rectify=rectify, implementation="reference")
    assert y.shape == (4, 3, CHANNELS)
    for t in range(4):
        for f in range(3):
            expected = bias.clone()
            for i in range(3):
                for j in range(3):
                    row, column = 2 * t + i - 1, 2 * f + j - 1
                    if 0 <= row < 7 and 0 <= column < 6 and real[row]:
                        expected += weight[:, 0, i, j] * (x[row, column].clamp(min=0) if rectify else x[row, column])
            torch.testing.assert_close(y[t, f], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("size", [(8, 6, 5), (7, 5, 5), (8, 5, 5), (1, 1, 5), (2, 3, 5), (8, 7, 1)], ids=str)
@pytest.mark.parametrize("implementation", FAST)
def test_fast_version_matches_the_reference(implementation, size, rectify, dtype):
    arguments = inputs(*size)
    probe = torch.randn(-(-size[0] // 2), -(-size[1] // 2), CHANNELS).bfloat16().double()
    expected = results("reference", arguments, rectify, probe, torch.float64)
    got = results(implementation, arguments, rectify, probe, dtype)
    for name in NAMES:
        error = (got[name].detach().double() - expected[name].detach()).norm()
        assert float(error) <= TOLERANCE[dtype] * float(expected[name].detach().norm()), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_frames_may_hold_anything(implementation):
    x, real, weight, bias = inputs(8, 6, CHANNELS)
    y = depthwise_stride2(x, real, weight, bias, rectify=True, implementation=implementation)
    x[~real] = torch.nan
    assert torch.equal(depthwise_stride2(x, real, weight, bias, rectify=True, implementation=implementation), y)
