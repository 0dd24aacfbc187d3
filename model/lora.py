"""LoRA (Hu et al. 2021), rsLoRA and DoRA (Liu et al. 2024) as a transformation of the parameter tree.

Beside an adapted matrix `name` stands `name_lora`: {a, b} and, for DoRA, {magnitude}; the matrix itself keeps its path and is frozen.
Before a layer runs, `bound` puts the two together, and `model.linear.linear` multiplies them: layers know nothing of it. The matrices of
routed experts [E, O, I] are added up instead, for a grouped product takes one matrix an expert.
"""

import functools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.schema import LoraConfig
from kernels.activation import widen
from model import params
from model.context import Context
from model.params import P, Tree

SUFFIX = "_lora"
OTHERS = {"vocab", "symbols", "taps", "scores", "head_dim", "one"}  # axes of what is no projection: tables, convolutions, routers


@dataclass(frozen=True)
class Adapted:
    """A frozen matrix [O, I] with its low-rank update: what stands for it among a layer's weights."""

    weight: Tensor
    a: Tensor  # [R, I]
    b: Tensor  # [O, R]
    scale: float
    magnitude: Tensor | None  # [O], DoRA: length of each row of the product relative to the frozen one, less 1
    dropout: float = 0.0
    salt: Tensor | None = None  # scalar, another one for every matrix
    ctx: Context | None = None
    first: int | None = None  # which of all columns is the first one here, where they are split over ctx.tp_group

    def flatten(self, first: int) -> "Adapted":
        """A matrix has nothing to flatten; convolutions of one tap do so with theirs."""
        return self


def extend(spec: Tree, cfg: LoraConfig) -> Tree:
    """`spec` with the adapters of every projection whose path begins with a match of one of cfg.targets; nothing at rank 0."""
    return _extended(spec, cfg, "") if cfg.rank else spec


def _extended(tree: Tree, cfg: LoraConfig, place: str) -> Tree:
    if isinstance(tree, list):
        return [_extended(part, cfg, f"{place}{i}.") for i, part in enumerate(tree)]
    out = {}
    for name, part in tree.items():
        if not isinstance(part, P):
            out[name] = _extended(part, cfg, f"{place}{name}.")
        elif adaptable(part) and params.chosen(place + name, cfg.targets):
            out[name], out[name + SUFFIX] = replace(part, trained=False), _adapter(place + name, part, cfg)
        else:
            out[name] = part
    return out


def adaptable(p: P) -> bool:
    """Whether a leaf is a projection: a matrix that layers multiply with `linear`, or such a one for each routed expert."""
    return p.kind == "param" and not OTHERS & set(p.axes) and (len(p.shape) == 2 or (len(p.shape) == 3 and p.axes[0] == "experts"))


def rank_of(path: str, cfg: LoraConfig) -> int:
    """Rank of the update of one projection."""
    return next((rank for pattern, rank in cfg.ranks.items() if params.chosen(path, [pattern])), cfg.rank)


def _adapter(path: str, p: P, cfg: LoraConfig) -> dict[str, P]:
    """a as PyTorch initialises a projection, b at zero: the first step starts from the frozen model."""
    *experts, rows, columns = p.shape
    *expert_axes, row_axis, column_axis = p.axes
    bound, rank = columns**-0.5, rank_of(path, cfg)
    tree = {"a": P((*experts, rank, columns), (*expert_axes, "rank", column_axis), "uniform", low=-bound, high=bound),
            "b": replace(p, shape=(*experts, rows, rank), axes=(*expert_axes, row_axis, "rank"), init="zeros", trained=True)}
    if cfg.dora:
        tree["magnitude"] = P((rows,), (row_axis,), "zeros")
    if cfg.dropout:
        tree["salt"] = P((1,), ("one",), "uniform", high=float(2**24), kind="buffer")
    return tree


def scale(rank: int, cfg: LoraConfig) -> float:
    """The factor on b a: alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023)."""
    return cfg.alpha / (math.sqrt(rank) if cfg.rslora else rank)


def binder(cfg: LoraConfig) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes of a function of (weights, inputs..., ctx) one that takes the weights as `extend` lists them; the same one for the same
    function each time, so that it compiles once."""

    @functools.cache
    def bind(fn: Callable[..., Any]) -> Callable[..., Any]:
        def adapted(w: Tree, *inputs: Any) -> Any:
            return fn(bound(w, cfg, inputs[-1]), *inputs)

        return adapted

    return bind


def bound(w: Tree, cfg: LoraConfig, ctx: Context) -> Tree:
    """The weights of a layer with each adapter inside its matrix."""
    if isinstance(w, list):
        return [bound(part, cfg, ctx) for part in w]
    if not isinstance(w, dict):
        return w
    names = [name for name in w if not name.endswith(SUFFIX)]
    return {name: _together(w[name], w[name + SUFFIX], cfg, ctx) if name + SUFFIX in w else bound(w[name], cfg, ctx) for name in names}


def _together(weight: Tensor, adapter: dict[str, Tensor], cfg: LoraConfig, ctx: Context) -> Tensor | Adapted:
    factor = scale(adapter["a"].shape[-2], cfg)
    if weight.ndim == 3:
        return merged(weight, adapter, factor)
    dropout = cfg.dropout if ctx.training else 0.0
    return Adapted(weight, adapter["a"], adapter["b"], factor, adapter.get("magnitude"), dropout, adapter.get("salt"), ctx)


def merged(weight: Tensor, adapter: dict[str, Tensor], factor: float) -> Tensor:
    """One matrix [O, I] (or [E, O, I]) that multiplies like the frozen one with its adapter; computed in fp32 or wider, rounded once."""
    whole = widen(weight) + factor * (widen(adapter["b"]) @ widen(adapter["a"]))
    if "magnitude" in adapter:
        whole = whole * (row_lengths(weight) * (1 + widen(adapter["magnitude"])) / row_lengths(whole))[:, None]
    return whole.to(weight.dtype)


def row_lengths(weight: Tensor) -> Tensor:
    """Euclidean length of each row of a matrix, in fp32 or wider."""
    return torch.linalg.vector_norm(widen(weight), dim=-1)


def merge(path: str, read: Callable[[str], Tensor], names: Container[str], cfg: LoraConfig) -> Tensor:
    """The whole tensor at `path`, with its adapter added where one of `names` is its; `read` gives whole tensors by name."""
    parts = {part: f"{path}{SUFFIX}.{part}" for part in ("a", "b", "magnitude")}
    adapter = {part: read(name) for part, name in parts.items() if name in names}
    return merged(read(path), adapter, scale(adapter["a"].shape[-2], cfg)) if adapter else read(path)


def targets(spec: Tree, patterns: Sequence[str]) -> dict[str, P]:
    """The projections that the patterns choose, by path."""
    return {path: p for path, p in params.named_leaves(spec) if adaptable(p) and params.chosen(path, patterns)}
