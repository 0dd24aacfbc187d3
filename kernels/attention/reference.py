"""Attention from its definition."""

import torch
from torch import Tensor

from kernels.activation import widen


def attention_reference(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, causal: bool, scale: float,
                        window: int | None) -> tuple[Tensor, Tensor]:
    """A dense matrix of scores for each head, masked."""
    q_TGRH = widen(q_TNH).unflatten(1, (k_TGH.shape[1], -1))
    scores_GRTT = torch.einsum("igrh,jgh->grij", q_TGRH, widen(k_TGH)) * scale
    row = torch.arange(len(q_TNH), device=q_TNH.device)
    sees_TT = segments_T[:, None] == segments_T
    if causal:
        sees_TT &= row <= row[:, None]
    if window is not None:
        sees_TT &= (row - row[:, None]).abs() < window
    scores_GRTT = torch.where(sees_TT, scores_GRTT, -torch.inf)
    # the rows beyond the last document attend to each other, which keeps NaN out of their gradients, until they are cleared here
    real_T = segments_T < len(cu_seqlens_U1) - 1
    lse_NT = torch.where(real_T, scores_GRTT.logsumexp(-1), -torch.inf).flatten(0, 1)
    weights_GRTT = torch.where(real_T[:, None], scores_GRTT.softmax(-1), 0)
    return torch.einsum("grij,jgh->igrh", weights_GRTT, widen(v_TGH)).flatten(1, 2).to(q_TNH.dtype), lse_NT
