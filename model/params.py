"""Parameters as data: one description tree from which initialisation, sharding, checkpoint names and counts follow.

Shape letters, used as suffixes everywhere (logical sizes, never local ones):
B rows, T packed tokens, U utterances, A audio frames, M mel bins, D model, N query heads, G kv heads or ssm groups, H head dim,
F ffn, E experts, K experts a token, R routed rows on local experts, V vocabulary, S ssm state, C conv width, L layers.
Units go into names: _sec, _frames, _tokens, _samples, _bytes.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any  # nested dicts and lists whose leaves are P or tensors


@dataclass(frozen=True)
class P:
    """One parameter or buffer: its shape, one logical axis name a dimension, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"  # a key of INITS
    std: float = 0.02  # standard deviation of "normal", value of "constant"
    low: float = 0.0  # ends of "uniform", "log_uniform" and "dt_bias"
    high: float = 1.0
    kind: str = "param"  # param | buffer; a buffer gets no gradient, its layer returns its update
    trained: bool = True  # of a param: whether it is learned (see model/freezing.py)
    drawn: int | None = None  # rows that are drawn, where the others of the first dimension are padding of zeros

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"parameter of shape {self.shape} names {len(self.axes)} axes: {self.axes}")

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: matrices and larger, never norms, biases or one-dimensional parameters."""
        return self.kind == "param" and sum(n > 1 for n in self.shape) >= 2 and self.init == "normal"


def _dt_bias(p: P, t: Tensor, g: torch.Generator) -> Tensor:
    """Inverse softplus of log-uniform step sizes in [low, high] (Mamba-2, Dao & Gu 2024)."""
    dt = torch.exp(t.uniform_(math.log(p.low), math.log(p.high), generator=g)).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


def _sinusoids(p: P, t: Tensor, g: torch.Generator) -> Tensor:
    """Whisper's positions: sines, then cosines, of row number times frequencies from 1 down to 1e-4."""
    half = p.shape[1] // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10000.0) / (half - 1)))
    angles = torch.arange(p.shape[0])[:, None] * frequencies
    return t.copy_(torch.cat((angles.sin(), angles.cos()), 1))


INITS: dict[str, Callable[[P, Tensor, torch.Generator], Tensor]] = {
    "normal": lambda p, t, g: t.normal_(0, p.std, generator=g),
    "zeros": lambda p, t, g: t.zero_(),
    "ones": lambda p, t, g: t.fill_(1),
    "constant": lambda p, t, g: t.fill_(p.std),
    "uniform": lambda p, t, g: t.uniform_(p.low, p.high, generator=g),
    "log_uniform": lambda p, t, g: t.uniform_(p.low, p.high, generator=g).log_(),
    "dt_bias": _dt_bias,
    "sinusoids": _sinusoids,
}


def draw(path: str, p: P, seed: int) -> Tensor:
    """The full fp32 tensor of `p`, from a generator seeded by (seed, path) alone: equal on every world size."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if p.drawn is None:
        return INITS[p.init](p, torch.empty(p.shape, dtype=torch.float32), generator)
    rows = INITS[p.init](p, torch.empty(p.drawn, *p.shape[1:], dtype=torch.float32), generator)
    return torch.cat((rows, rows.new_zeros(p.shape[0] - p.drawn, *p.shape[1:])))


def init(spec: Tree, seed: int) -> Tree:
    """Every parameter and buffer of `spec` as a full, unsharded fp32 tensor."""
    return map_named(lambda path, p: draw(path, p, seed), spec)


def map_named(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """tree_map whose function also gets the leaf's dotted path, e.g. decoder.layers.3.mixer.up."""
    return pytree.tree_map_with_path(lambda path, *leaves: fn(_dotted(path), *leaves), tree, *rest)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) in tree order."""
    for path, leaf in pytree.tree_leaves_with_path(tree):
        yield _dotted(path), leaf


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(k.key if isinstance(k, pytree.MappingKey) else k.idx) for k in path)


def chosen(path: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted path begins with a match of one of the patterns."""
    return any(re.match(pattern, path) for pattern in patterns)


def subtree(tree: Tree, path: str) -> Tree:
    """The part of `tree` under a dotted path."""
    for key in path.split("."):
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree


def count(spec: Tree, kind: str = "param") -> int:
    """Number of elements of all leaves of that kind."""
    return sum(math.prod(p.shape) for p in pytree.tree_leaves(spec) if p.kind == kind)


def split_kinds(spec: Tree, tree: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    """`tree` (same structure as `spec`) as two flat dicts by dotted path: parameters, buffers."""
    kinds = dict(named_leaves(spec))
    flat = dict(named_leaves(tree))
    return ({k: v for k, v in flat.items() if kinds[k].kind == "param"},
            {k: v for k, v in flat.items() if kinds[k].kind == "buffer"})
