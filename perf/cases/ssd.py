"""The scan of Mamba-2: 64 heads of 64 numbers, 8 groups, 128 states in Nemotron-3-Nano."""

from typing import Any

import torch

from kernels.ssd import IMPLEMENTATIONS, ssd
from perf.cases import Case, Draw, Operation, Use, Work, speech_lengths


def _case(name: str, use: Use, lengths: list[int], heads: int, groups: int, head_dim: int, state: int, chunk: int) -> Case:
    tokens = sum(lengths)

    def inputs(draw: Draw) -> dict[str, Any]:
        wide = draw.normal(tokens, heads * head_dim + 2 * groups * state, std=0.5)
        x, b, c = wide.split((heads * head_dim, groups * state, groups * state), 1)
        return {"x_TNH": x.unflatten(1, (heads, -1)), "dt_TN": draw.normal(tokens, heads), "a_N": -draw.uniform(1, 16, heads).float(),
                "b_TGS": b.unflatten(1, (groups, -1)), "c_TGS": c.unflatten(1, (groups, -1)), "d_N": draw.normal(heads),
                "dt_bias_N": draw.uniform(-7, -2, heads), "dt_limit": (1e-4, float("inf")), "chunk": chunk,
                "segments_T": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(draw.device)}

    within = 2.0 * tokens * min(chunk, tokens) * (state * groups + head_dim * heads)  # scores and their products with x
    across = 4.0 * tokens * heads * head_dim * state  # into the state and out of it
    once = 2.0 * tokens * (heads * head_dim + 2 * groups * state) + 4.0 * tokens * heads
    forward = Work(within + across, once + 2.0 * tokens * heads * head_dim)
    backward = Work(2 * within + 2.5 * across, 2 * once + 2.0 * tokens * heads * head_dim)
    return Case(name, use, inputs, ("x_TNH", "dt_TN", "a_N", "b_TGS", "c_TGS", "d_N", "dt_bias_N"), forward, backward)


NANO = {"heads": 64, "groups": 8, "head_dim": 64, "state": 128, "chunk": 128}
CASES = [
    _case("odd lengths", "accuracy", [1, 17, 64, 3, 40], 4, 2, 8, 6, 16),
    _case("Nemotron-3-Nano", "compile", [1000, 48], **NANO),
    _case("Falcon-H1-34B", "compile", [1000, 48], heads=32, groups=2, head_dim=128, state=256, chunk=128),
    _case("Nemotron-3-Nano, 8k in one document", "model", [8192], **NANO),
    _case("Nemotron-3-Nano, 8k of speech", "model", speech_lengths(8192), **NANO),
    _case("Nemotron-3-Nano, 32k in four documents", "model", [8192] * 4, **NANO),
]

OPERATION = Operation("ssd", ssd, IMPLEMENTATIONS, CASES, products=frozenset({"_walk", "_scan", "_readers", "_writers"}),
                      devices={"mamba_ssm": "cuda"})
