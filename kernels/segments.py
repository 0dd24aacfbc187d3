"""Documents of a packed row, from a number for each token."""

import torch.nn.functional as F
from torch import Tensor


def documents(segments_T: Tensor) -> Tensor:
    """Counts the runs of equal numbers, from 0: a number that comes back after another one is a new document. int64 [T]"""
    return F.pad((segments_T[1:] != segments_T[:-1]).cumsum(0), (min(1, len(segments_T)), 0))
