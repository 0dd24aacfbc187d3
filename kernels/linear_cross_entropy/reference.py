"""The definition, of all logits at once."""

import torch
from torch import Tensor

from kernels.activation import widen


def linear_cross_entropy_reference(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None, ignore_index: int,
                                   label_smoothing: float, z_loss: float, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logits_TV = widen(torch.einsum("td,vd->tv", h_TD, weight_VD))
    if soft_cap is not None:
        logits_TV = soft_cap * torch.tanh(logits_TV / soft_cap)
    labelled_T = labels_T != ignore_index
    chosen_T = logits_TV.gather(1, torch.where(labelled_T, labels_T, 0)[:, None])[:, 0]
    lse_T = logits_TV.logsumexp(1)
    target_T = (1 - label_smoothing) * chosen_T + label_smoothing * logits_TV.mean(1)
    loss_T = lse_T - target_T + z_loss * lse_T.square()
    return torch.where(labelled_T, loss_T, 0).sum(), labelled_T.sum()
