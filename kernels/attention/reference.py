"""Attention from its definition."""

import torch
from torch import Tensor

from kernels.activation import widen


def attention_reference(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                        causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """A dense matrix of scores for each head, masked."""
    q_TGRH = widen(q_TNH).unflatten(1, (k_SGH.shape[1], -1))
    scores_GRTS = torch.einsum("igrh,jgh->grij", q_TGRH, widen(k_SGH)) * scale
    sees_TS = _sees(len(k_SGH), cu_seqlens_U1, segments_T, keys_2U, causal, window)
    # the scores of rows that see nothing stay, which keeps NaN out of their gradients, until they are cleared here
    sighted_T = sees_TS.any(-1)
    scores_GRTS = torch.where(sees_TS | ~sighted_T[:, None], scores_GRTS, -torch.inf)
    lse_NT = torch.where(sighted_T, scores_GRTS.logsumexp(-1), -torch.inf).flatten(0, 1)
    weights_GRTS = torch.where(sighted_T[:, None], scores_GRTS.softmax(-1), 0)
    return torch.einsum("grij,jgh->igrh", weights_GRTS, widen(v_SGH)).flatten(1, 2).to(q_TNH.dtype), lse_NT


def _sees(keys: int, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None, causal: bool, window: int | None) -> Tensor:
    """Whether row i sees key j. [T, S]"""
    first_U, end_U = (cu_seqlens_U1[:-1], cu_seqlens_U1[1:]) if keys_2U is None else keys_2U
    documents = len(first_U)
    document_T = segments_T.clamp(max=documents - 1).long()
    row, key = torch.arange(len(segments_T), device=segments_T.device), torch.arange(keys, device=segments_T.device)
    sees_TS = (segments_T < documents)[:, None] & (key >= first_U[document_T, None]) & (key < end_U[document_T, None])
    ahead_TS = key - (row + (end_U - cu_seqlens_U1[1:])[document_T])[:, None]  # of the key at which the row sits
    if causal:
        sees_TS &= ahead_TS <= 0
    if window is not None:
        sees_TS &= ahead_TS.abs() < window
    return sees_TS
