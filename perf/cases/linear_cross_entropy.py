"""Head and loss. Labels of a row are those of its text; audio, prompts and padding have none."""

from typing import Any

import torch

from kernels.linear_cross_entropy import IMPLEMENTATIONS, linear_cross_entropy
from perf.cases import Case, Draw, Operation, Use, Work

GRADIENTS = ("h_TD", "weight_VD")


def _case(name: str, use: Use, rows: int, width: int, vocabulary: int, labelled: float = 1.0, **options: Any) -> Case:
    def inputs(draw: Draw) -> dict[str, Any]:
        labels = draw.integers(vocabulary, rows)
        unlabelled = draw.uniform(0, 1, rows) >= labelled
        return {"h_TD": draw.normal(rows, width), "weight_VD": draw.normal(vocabulary, width, std=width**-0.5),
                "labels_T": torch.where(unlabelled, -100, labels), **options}

    product = 2.0 * rows * width * vocabulary
    read = 2 * (rows * width + vocabulary * width)
    # Forward and backward run together: two more products, the gradient of h in bf16 and that of the weight in fp32.
    return Case(name, use, inputs, GRADIENTS, Work(product, read), Work(2 * product, read + 2 * rows * width + 4 * vocabulary * width))


CASES = [
    _case("odd sizes", "accuracy", 21, 24, 37, labelled=0.7, chunk=8),
    _case("all options", "accuracy", 21, 24, 37, labelled=0.7, chunk=8, label_smoothing=0.1, z_loss=0.01, soft_cap=3.0),
    _case("one row", "accuracy", 1, 16, 64),
    _case("Nemotron-3-Nano", "compile", 48, 2688, 4096),
    _case("all options", "compile", 48, 64, 4096, label_smoothing=0.1, z_loss=1e-4, soft_cap=30.0),
    _case("vocabulary of odd size", "compile", 48, 64, 4097),
    _case("Nemotron-3-Nano 8k", "model", 8192, 2688, 131072),
    _case("Nemotron-3-Nano 32k", "model", 32768, 2688, 131072),
    _case("Nemotron-3-Nano 8k, speech", "model", 8192, 2688, 131072, labelled=0.3),
    _case("Qwen3-30B-A3B 32k", "model", 32768, 2048, 151936),
    _case("GLM-ASR 8k", "model", 8192, 2048, 59264, labelled=0.3),
]

OPERATION = Operation(
    "linear_cross_entropy", linear_cross_entropy, IMPLEMENTATIONS, CASES, devices={"liger": "cuda"},
    candidates={"_row_kernel": [{"BLOCK_V": block, "num_warps": warps} for block in (1024, 2048, 4096, 8192, 16384) for warps in (4, 8, 16)
                                if 4 <= block // (32 * warps) <= 64]})
