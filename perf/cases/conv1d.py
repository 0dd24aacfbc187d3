"""The causal convolution of Mamba-2 layers, and the centred one of Conformer layers, which is compared by its own public function."""

from typing import Any

import torch

from kernels.conv1d import IMPLEMENTATIONS, causal_conv1d
from perf.cases import Case, Draw, Operation, Use, Work, speech_lengths


def _case(name: str, use: Use, lengths: list[int], channels: int, width: int) -> Case:
    tokens = sum(lengths)

    def inputs(draw: Draw) -> dict[str, Any]:
        return {"x_TC": draw.normal(tokens, channels), "weight_CW": draw.normal(channels, width, std=0.3), "bias_C": draw.normal(channels),
                "segments_T": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(draw.device)}

    size = 2.0 * tokens * channels
    return Case(name, use, inputs, ("x_TC", "weight_CW", "bias_C"), Work(0, 2 * size), Work(0, 3 * size))


CASES = [
    _case("odd lengths", "accuracy", [1, 2, 3, 17, 30], 6, 4),
    _case("Nemotron-3-Nano", "compile", [1000, 48], 6144, 4),
    _case("Nemotron-3-Nano, 8k in one document", "model", [8192], 6144, 4),
    _case("Nemotron-3-Nano, 8k of speech", "model", speech_lengths(8192), 6144, 4),
    _case("Nemotron-3-Nano, 32k in four documents", "model", [8192] * 4, 6144, 4),
]

OPERATION = Operation("conv1d", causal_conv1d, IMPLEMENTATIONS, CASES, devices={"causal_conv1d": "cuda"})
