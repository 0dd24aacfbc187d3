"""Tensors of genuine sizes that a laptop holds, because most of their pages are never touched."""

import math
import mmap

import torch
from torch import Tensor

NO_RESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on


def sparse(rows: int, stride: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] with a distance of `stride` elements between rows, however far that is; zeros."""
    size = ((rows - 1) * stride + columns) * dtype.itemsize
    pages = mmap.mmap(-1, math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(pages, dtype=dtype).as_strided((rows, columns), (stride, 1))
