"""Routed experts of mixture-of-experts layers. Work is counted for the rows that the routing makes, without padding."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.activation import expansion
from kernels.experts import IMPLEMENTATIONS, experts
from perf.cases import Case, Draw, Operation, Use, Work

GRADIENTS = ("x_TD", "weights_TK", "up_EFD", "down_EDF")
Routing = Callable[[Draw, int, int, int], Tensor]  # tokens, experts, choices -> ids [T, K]


def uniform(draw: Draw, tokens: int, n_experts: int, choices: int) -> Tensor:
    """Every expert as likely as any other."""
    return _random(draw, tokens, n_experts).topk(choices).indices


def zipf(draw: Draw, tokens: int, n_experts: int, choices: int) -> Tensor:
    """The expert of rank r drawn with a weight of r ** -1.5, without replacement (Efraimidis and Spirakis)."""
    weights = torch.arange(1, n_experts + 1, device=draw.device) ** -1.5
    return (_random(draw, tokens, n_experts).log() / weights).topk(choices).indices


def _random(draw: Draw, tokens: int, n_experts: int) -> Tensor:
    return torch.rand(tokens, n_experts, device=draw.device, generator=draw.generator)


def hot(draw: Draw, tokens: int, n_experts: int, choices: int) -> Tensor:
    """Expert 0 takes part in every token."""
    others = 1 + _random(draw, tokens, n_experts - 1).topk(choices - 1).indices
    return torch.cat([torch.zeros_like(others[:, :1]), others], 1)


def tenth_empty(draw: Draw, tokens: int, n_experts: int, choices: int) -> Tensor:
    """No token for one expert in ten."""
    ids = uniform(draw, tokens, n_experts - n_experts // 10, choices)
    return ids + ids // 9  # experts 9, 19, ... stay empty


def _case(name: str, use: Use, tokens: int, n_experts: int, choices: int, width: int, ffn: int, activation: str = "relu2", ranks: int = 1,
          routing: Routing = uniform) -> Case:
    """With `ranks`, one rank's share: the tokens of all, the experts of the first, and choices that lie elsewhere."""
    rows_in = expansion(activation) * ffn

    def inputs(draw: Draw) -> dict[str, Any]:
        return {"x_TD": draw.normal(tokens, width), "ids_TK": routing(draw, tokens, n_experts * ranks, choices),
                "weights_TK": draw.uniform(0.5, 1.5, tokens, choices).float(),
                "up_EFD": draw.normal(n_experts, rows_in, width, std=width**-0.5),
                "down_EDF": draw.normal(n_experts, width, ffn, std=ffn**-0.5), "activation": activation, "keep_hidden": ranks == 1}

    flops = 2.0 * tokens * choices / ranks * width * (rows_in + ffn)
    weights = n_experts * width * (rows_in + ffn)
    return Case(name, use, inputs, GRADIENTS, Work(flops, 2.0 * (weights + 2 * tokens * width)),
                Work(2 * flops, 2.0 * (2 * weights + 3 * tokens * width)))


NANO: dict[str, Any] = dict(choices=6, width=2688, ffn=1856)
QWEN: dict[str, Any] = dict(choices=8, width=2048, ffn=768, activation="swiglu")
CASES = [
    _case("odd sizes", "accuracy", 37, 5, 2, 40, 24),
    _case("odd sizes, gated", "accuracy", 37, 5, 2, 40, 24, "swiglu"),
    _case("a rank's share", "accuracy", 50, 3, 2, 33, 31, "swiglu", ranks=3),
    _case("a hot expert", "accuracy", 70, 8, 2, 32, 32, routing=hot),
    _case("Nemotron-3-Nano, many rows", "compile", 100, 2, **NANO | dict(choices=2)),
    _case("Nemotron-3-Nano, few rows", "compile", 8, 2, **NANO | dict(choices=2)),
    _case("Qwen3-30B-A3B, many rows", "compile", 100, 2, **QWEN | dict(choices=2)),
    _case("Qwen3-30B-A3B, few rows", "compile", 8, 2, **QWEN | dict(choices=2)),
    _case("widths that fill no tile", "compile", 100, 2, 2, 1000, 504),
    *(_case(f"Nemotron-3-Nano {tokens // 1024}k{', ' if note else ''}{note}", "model", tokens, 128, **NANO, routing=routing)
      for tokens, (note, routing) in itertools.product((8192, 32768), (("", uniform), ("Zipf", zipf), ("a hot expert", hot),
                                                                       ("a tenth empty", tenth_empty)))),
    _case("Nemotron-3-Nano 8k a rank, 8 ranks", "model", 8 * 8192, 16, **NANO, ranks=8),
    _case("Nemotron-3-Nano 32k a rank, 8 ranks", "model", 8 * 32768, 16, **NANO, ranks=8),
    _case("Qwen3-30B-A3B 32k", "model", 32768, 128, **QWEN),
    _case("Qwen3-30B-A3B 32k, Zipf", "model", 32768, 128, **QWEN, routing=zipf),
]


def _tiles(*choices: tuple[int, ...]) -> list[dict[str, int]]:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "RESIDENT", "num_warps", "num_stages")
    return [dict(zip(names, choice, strict=True)) for choice in choices]


def _group_tiles(*choices: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages"), choice, strict=True)) for choice in choices]


ROWS = _tiles((64, 128, 64, 8, 2, 4, 3), (64, 256, 64, 8, 1, 4, 3), (128, 128, 64, 8, 2, 8, 3), (128, 128, 64, 8, 1, 8, 4),
              (128, 256, 64, 8, 1, 8, 3), (128, 256, 64, 4, 1, 8, 4))
OPERATION = Operation("experts", experts, IMPLEMENTATIONS, CASES, candidates={
    "_up_kernel": ROWS, "_rows_kernel": ROWS,
    "_hidden_backward_kernel": _tiles((64, 128, 64, 8, 2, 4, 3), (128, 128, 64, 8, 1, 8, 3), (128, 128, 64, 8, 1, 8, 4),
                                      (128, 256, 64, 8, 1, 8, 3)),
    "_groups_kernel": _group_tiles((128, 128, 64, 8, 8, 4), (128, 128, 64, 8, 8, 5), (128, 256, 64, 8, 8, 4), (64, 128, 64, 8, 4, 5)),
}, products=frozenset({"_up_kernel", "_rows_kernel", "_hidden_backward_kernel", "_groups_kernel"}), devices={"cpu": "cpu"})
