"""Which expert each choice of a token goes to."""

import torch
from torch import Tensor


def expert_keys(ids_TK: Tensor, n_experts: int) -> Tensor:
    """Expert of each choice [T * K], n_experts where there is none."""
    ids = ids_TK.flatten()
    return torch.where((ids >= 0) & (ids < n_experts), ids, n_experts)
