"""Relative attention of Conformers, on rows with a gap frame behind each utterance."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.ragged import Layout
from kernels.relative_attention import IMPLEMENTATIONS, relative_attention
from perf.cases import Case, Draw, Operation, Use, Work

GRADIENTS = ("q_ANH", "k_ANH", "v_ANH", "table_RNH", "bias_u_NH", "bias_v_NH")


def _layout(lengths: Sequence[int], draw: Draw) -> Layout:
    places = torch.tensor(lengths) + 1
    starts = places.cumsum(0) - places
    segments = torch.arange(len(lengths)).repeat_interleave(places)
    positions = torch.arange(len(segments)) - starts[segments]
    starts, sizes, segments, positions = (t.to(draw.device) for t in (starts, torch.tensor(lengths), segments, positions))
    return Layout(starts, sizes, segments, positions, max(lengths))


def _case(name: str, use: Use, lengths: Sequence[int], heads: int, size: int) -> Case:
    def inputs(draw: Draw) -> dict[str, Any]:
        frames, distances = sum(lengths) + len(lengths), 2 * max(lengths) - 1
        rows = {name: draw.normal(frames, heads, size) for name in ("q_ANH", "k_ANH", "v_ANH")}
        biases = {name: draw.normal(heads, size) for name in ("bias_u_NH", "bias_v_NH")}
        return {**rows, "table_RNH": draw.normal(distances, heads, size), **biases, "layout": _layout(lengths, draw)}

    pairs, elements = sum(n * n for n in lengths), 2.0 * (sum(lengths) + len(lengths)) * heads * size
    # Two products for the scores, one with the values; backward two for each of them and the scores again.
    flops = 2.0 * pairs * heads * size
    return Case(name, use, inputs, GRADIENTS, Work(3 * flops, 4 * elements), Work(8 * flops, 8 * elements))


CASES = [
    _case("utterances around a tile", "accuracy", [1, 33, 64, 65], 2, 8),
    _case("heads of 128", "compile", [100, 26], 8, 128),
    _case("FastConformer XL, 64 × 10 s", "model", [125] * 64, 8, 128),
    _case("FastConformer XL, 30 s beside 1 to 10 s", "model", [375] * 4 + [12, 25, 50, 100, 125] * 16, 8, 128),
]

OPERATION = Operation("relative_attention", relative_attention, IMPLEMENTATIONS, CASES,
                      products=frozenset({"_forward_kernel", "_query_kernel", "_key_kernel"}), devices={"ragged": "cpu"})
