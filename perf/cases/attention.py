"""Attention of decoders and encoders. Products are counted for the pairs of rows and keys that see each other."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention import IMPLEMENTATIONS, attention
from perf.cases import Case, Draw, Operation, Use, Work, speech_lengths

GRADIENTS = ("q_TNH", "k_SGH", "v_SGH")


def _case(name: str, use: Use, lengths: Sequence[int], heads: tuple[int, int], size: int, padding: int = 0,
          ranges: Sequence[tuple[int, int]] | None = None, **options: Any) -> Case:
    """`heads` of queries and of keys; `ranges` of keys, where they are not the rows of the documents."""
    rows, (queries, shared) = sum(lengths) + padding, heads
    keys = rows if ranges is None else ranges[-1][1]

    def inputs(draw: Draw) -> dict[str, Any]:
        segments = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, padding]))
        chosen = {} if ranges is None else {"keys_2U": torch.tensor(ranges).T.int().to(draw.device)}
        return {"q_TNH": draw.normal(rows, queries, size), "k_SGH": draw.normal(keys, shared, size),
                "v_SGH": draw.normal(keys, shared, size), "cu_seqlens_U1": draw.ends(lengths),
                "segments_T": segments.int().to(draw.device), **chosen, **options}

    pairs = sum(n * (n + 1) // 2 if options.get("causal", True) else n * n for n in lengths)
    flops, elements = 4.0 * pairs * queries * size, 2.0 * rows * (queries + shared) * size
    return Case(name, use, inputs, GRADIENTS, Work(flops, 2 * elements), Work(2.5 * flops, 4 * elements))


CASES = [
    _case("documents around a tile", "accuracy", [1, 127, 128, 0, 129, 40], (4, 2), 16, padding=9),
    _case("both directions, window", "accuracy", [150, 33], (2, 1), 24, padding=1, causal=False, window=50),
    _case("ranges of keys", "accuracy", [50, 0, 90], (2, 2), 16, padding=4, ranges=[(0, 40), (40, 40), (40, 200)]),
    _case("heads of 64, both directions", "compile", [100, 28], (20, 20), 64, causal=False),
    _case("heads of 80, window", "compile", [100, 28], (32, 8), 80, window=64),
    _case("heads of 128", "compile", [100, 28], (32, 2), 128),
    _case("heads of 256", "compile", [100, 28], (16, 8), 256),
    _case("Nemotron-3-Nano 8k, documents of 2k", "model", [2048] * 4, (32, 2), 128),
    _case("Nemotron-3-Nano 8k, one document", "model", [8192], (32, 2), 128),
    _case("Nemotron-3-Nano 8k, speech", "model", speech_lengths(8192), (32, 2), 128),
    _case("Nemotron-3-Nano 32k, documents of 8k", "model", [8192] * 4, (32, 2), 128),
    _case("Qwen3-30B-A3B 32k, one document", "model", [32768], (32, 4), 128),
    _case("GLM-ASR decoder 8k, speech", "model", speech_lengths(8192), (16, 4), 128),
    _case("GLM-ASR encoder, 16 × 30 s", "model", [1500] * 16, (20, 20), 64, causal=False),
]


def _tiles(*choices: tuple[int, int, int, int]) -> list[dict[str, int]]:
    return [dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), choice, strict=True)) for choice in choices]


OPERATION = Operation("attention", attention, IMPLEMENTATIONS, CASES, candidates={
    "_forward_kernel": _tiles((128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
    "_query_kernel": _tiles((128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 8, 2)),
    "_key_kernel": _tiles((64, 64, 4, 2), (64, 128, 8, 1), (32, 128, 8, 3), (32, 64, 4, 2)),
}, products=frozenset({"_forward_kernel", "_query_kernel", "_key_kernel"}), devices={
    "blocks": "cpu", "varlen": "cuda", "flash": "cuda", "transformer_engine": "cuda"})
