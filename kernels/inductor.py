"""How to tell the compiler what it cannot see."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

SUM_ROWS = 32  # rows that are summed at a time


def stored(x: Tensor) -> Tensor:
    """x, computed once and written to memory in its own order. Takes no gradient: for use inside autograd functions.

    Inductor computes a pointwise x anew in every kernel that reads it, and in the order in which it is read: shifted or transposed
    reads then repeat the work, the transposed ones without vector instructions.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def sum_rows(x_TC: Tensor) -> Tensor:
    """Sum over rows, block by block: the walk down a whole column would miss the cache at every row. [C]"""
    whole = len(x_TC) // SUM_ROWS * SUM_ROWS
    total = x_TC[:whole].unflatten(0, (-1, SUM_ROWS)).sum(1).sum(0)
    return total if whole == len(x_TC) else total + x_TC[whole:].sum(0)


def name_cached_graphs(sources: Path = Path(__file__).parent) -> None:
    """Make the compiler's cache on disk tell graphs of one version of kernels/ from those of another.

    It knows a custom operator by its name: after a change to what the operator returns, it would run graphs made for the old one.
    """
    files = sorted(file for file in sources.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    torch.compiler.config.cache_key_tag = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
