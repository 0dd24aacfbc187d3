"""Which row of the grouped products serves which choice of which token; on the device, of static shapes, without a word to the host."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """Rows are the choices sorted stably by expert. Those without an expert here come last: their rows are neither computed nor read."""

    offsets_E1: Tensor  # int32 [E + 1], expert e owns rows offsets[e] : offsets[e + 1]
    choice_R: Tensor  # int32 [T * K], the flat choice (token * K + k) that a row serves
    token_R: Tensor  # int32 [T * K], its token
    slots_TK: Tensor  # int32 [T, K], the row of each choice; -1 where it has no expert here


def expert_keys(ids_TK: Tensor, n_experts: int) -> Tensor:
    """Expert of each choice [T * K], n_experts where there is none."""
    ids = ids_TK.flatten()
    return torch.where((ids >= 0) & (ids < n_experts), ids, n_experts)


def route(ids_TK: Tensor, n_experts: int) -> Routing:
    """The rows of these choices."""
    keys = expert_keys(ids_TK, n_experts).int()
    sorted_keys, order = torch.sort(keys, stable=True)
    experts_E = torch.arange(n_experts, dtype=torch.int32, device=keys.device)
    offsets_E1 = F.pad(torch.searchsorted(sorted_keys, experts_E, right=True, out_int32=True), (1, 0))
    rows = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    slots = torch.zeros_like(rows).scatter_(0, order, rows)
    choice_R = order.int()
    token_R = choice_R // ids_TK.shape[1] if ids_TK.shape[1] else choice_R
    return Routing(offsets_E1, choice_R, token_R, torch.where(keys < n_experts, slots, -1).view_as(ids_TK))
