"""Experts with PyTorch's own products, for comparison: one grouped product a layer, or one product an expert and layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import activate, widen
from kernels.experts.routing import expert_keys
from kernels.lookup import permute


def experts_grouped_mm(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
                       keep_hidden: bool = True) -> Tensor:
    keys = expert_keys(ids_TK, up_EFD.shape[0])
    order = torch.argsort(keys, stable=True)
    slots = torch.argsort(order)
    counts = (keys[:, None] == torch.arange(up_EFD.shape[0], device=keys.device)).sum(0)
    ends = counts.cumsum(0, dtype=torch.int32)
    exists = (torch.arange(len(keys), device=keys.device) < ends[-1])[:, None]  # rows beyond the last end are left unwritten
    rows = permute(x_TD.repeat_interleave(ids_TK.shape[1], 0), order, slots)
    h = F.grouped_mm(torch.where(exists, rows, 0), up_EFD.transpose(1, 2), offs=ends)
    h = activate(torch.where(exists, h, 0), activation)
    y = torch.where(exists, F.grouped_mm(h, down_EDF.transpose(1, 2), offs=ends), 0)
    y_TKD = permute(y, slots, order).unflatten(0, ids_TK.shape)
    return (widen(y_TKD) * weights_TK[..., None]).sum(1).to(x_TD.dtype)


def experts_loop(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
                 keep_hidden: bool = True) -> Tensor:
    """One expert after the other; the host reads how many tokens each has."""
    y_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
    for expert, (up, down) in enumerate(zip(up_EFD, down_EDF, strict=True)):
        token, k = torch.where(ids_TK == expert)
        y_RD = activate(x_TD[token] @ up.t(), activation) @ down.t()
        y_TD = y_TD.index_add(0, token, widen(y_RD) * weights_TK[token, k, None])
    return y_TD.to(x_TD.dtype)
