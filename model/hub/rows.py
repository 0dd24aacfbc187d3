"""A foreign checkpoint's names as data: one row for each kind of tensor, used to load and to export.

A row pairs our dotted path with the foreign names and says how the numbers lie. In a path, `{n}` stands for a layer number, `{2n}` and
`{2n+1}` for the two letters of our pattern that make block n of a transformer. In a foreign name `{n}` is the block, and `{e}` an expert,
whose tensors are our one tensor's first dimension.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import ModelConfig
from model.params import P

_HOLE = re.compile(r"\{(n|2n\+1|2n)\}")


@dataclass(frozen=True)
class Row:
    """One kind of tensor: our path, the foreign names and the layout.

    same: equal shapes. join: several foreign tensors one after another along our rows. unit: a foreign dimension of length 1 behind
    the first, which a convolution over one channel has. pairs: rotary pairs lie side by side in each head, and not half a head apart.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: str = "same"


@dataclass(frozen=True)
class Block:
    """A foreign tensor and the box of ours that holds it; without `permutation`, number by number."""

    name: str
    shape: tuple[int, ...]  # foreign
    dims: tuple[int | None, ...]  # for each foreign dimension ours, or None where its length is 1
    start: tuple[int, ...]  # of the box in our tensor
    size: tuple[int, ...]  # of the box
    permutation: Tensor | None = None  # our row i of the box is the foreign row permutation[i]


def row(ours: str, *theirs: str, layout: str = "same") -> Row:
    """A row; several foreign names are joined."""
    return Row(ours, theirs, "join" if len(theirs) > 1 else layout)


def affine(ours: str, theirs: str) -> tuple[Row, Row]:
    """The rows of a weight and of its bias."""
    return row(f"{ours}.weight", f"{theirs}.weight"), row(f"{ours}.bias", f"{theirs}.bias")


def renamed(rows: Sequence[Row], replacements: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows whose foreign names begin differently: the longest matching prefix is replaced."""
    def rename(name: str) -> str:
        prefix = max((p for p in replacements if name.startswith(p)), key=len, default=None)
        return name if prefix is None else replacements[prefix] + name.removeprefix(prefix)

    return tuple(Row(r.ours, tuple(map(rename, r.theirs)), r.layout) for r in rows)


def match(rows: Sequence[Row], path: str) -> tuple[Row, int] | None:
    """The row of one of our paths and the number of its block (0 where it has none)."""
    for r in rows:
        parts = _HOLE.split(r.ours)
        found = re.fullmatch("".join(r"(\d+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)), path)
        if found is None:
            continue
        number = int(found[1]) if found.groups() else 0
        hole = parts[1] if len(parts) > 1 else "n"
        if hole == "n" or number % 2 == ("+" in hole):
            return r, number if hole == "n" else number // 2
    return None


def blocks(r: Row, n: int, p: P, cfg: ModelConfig) -> Iterator[Block]:
    """The foreign tensors of one of ours. Rows that pad the vocabulary belong to none."""
    shape = tuple(min(length, cfg.decoder.vocab_size) if axis == "vocab" else length for length, axis in zip(p.shape, p.axes, strict=True))
    stacked = any("{e}" in name for name in r.theirs)
    row_dim = 1 if stacked else 0
    part = shape[row_dim] // len(r.theirs)
    size = (*shape[:row_dim], part, *shape[row_dim + 1 :])
    for i, name in enumerate(r.theirs):
        start = tuple(i * part if d == row_dim else 0 for d in range(len(shape)))
        if stacked:
            for e in range(shape[0]):
                yield Block(name.format(n=n, e=e), size[1:], tuple(range(1, len(shape))), (e, *start[1:]), (1, *size[1:]))
        elif r.layout == "unit":
            yield Block(name.format(n=n), (size[0], 1, *size[1:]), (0, None, *range(1, len(shape))), start, size)
        else:
            permutation = _side_by_side(p, cfg) if r.layout == "pairs" else None
            yield Block(name.format(n=n), size, tuple(range(len(shape))), start, size, permutation)


def _side_by_side(p: P, cfg: ModelConfig) -> Tensor:
    """Foreign row of each of ours, where the two numbers of a rotary pair are neighbours there and half the rotated part apart here."""
    head, rotated = cfg.decoder.head_dim, int(cfg.decoder.head_dim * cfg.decoder.rope_fraction)
    within = torch.cat((torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, head)))
    return (torch.arange(p.shape[0] // head)[:, None] * head + within).flatten()
