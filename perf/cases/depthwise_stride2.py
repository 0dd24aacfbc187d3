"""The encoder's subsampling convolution on log-mel frames."""

from typing import Any

import torch

from kernels.depthwise_stride2 import IMPLEMENTATIONS, depthwise_stride2
from perf.cases import Case, Draw, Operation, Use, Work


def _case(name: str, use: Use, frames: int, bins: int, channels: int, rectify: bool) -> Case:
    def inputs(draw: Draw) -> dict[str, Any]:
        real = torch.ones(frames, dtype=torch.bool, device=draw.device)
        real[frames // 3 : frames // 3 + 2] = False
        return {"x_TFC": draw.normal(frames, bins, channels), "real_T": real, "weight_C133": draw.normal(channels, 1, 3, 3, std=0.3),
                "bias_C": draw.normal(channels), "rectify": rectify}

    size = 2.0 * frames * bins * channels
    return Case(name, use, inputs, ("x_TFC", "weight_C133", "bias_C"), Work(18 * size / 8, size * 1.25), Work(36 * size / 8, size * 2.25))


CASES = [
    _case("odd sizes", "accuracy", 11, 7, 3, rectify=True),
    _case("even sizes", "accuracy", 12, 8, 4, rectify=False),
    _case("FastConformer, second layer of one minute", "model", 3000, 40, 256, rectify=True),
]

OPERATION = Operation("depthwise_stride2", depthwise_stride2, IMPLEMENTATIONS, CASES)
