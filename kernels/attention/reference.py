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


def backward_reference(dout_TNH: Tensor, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, out_TNH: Tensor, lse_NT: Tensor,
                       cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None, causal: bool,
                       scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """From the weights that these keys have among all."""
    q_TGRH, dout_TGRH, out_TGRH = (widen(t).unflatten(1, (k_SGH.shape[1], -1)) for t in (q_TNH, dout_TNH, out_TNH))
    sees_TS = _sees(len(k_SGH), cu_seqlens_U1, segments_T, keys_2U, causal, None)
    scores_GRTS = torch.einsum("igrh,jgh->grij", q_TGRH, widen(k_SGH)) * scale
    lse_GRT = lse_NT.unflatten(0, (k_SGH.shape[1], -1))
    weights_GRTS = torch.where(sees_TS, (scores_GRTS - lse_GRT[..., None]).exp(), 0)
    dweights_GRTS = torch.einsum("igrh,jgh->grij", dout_TGRH, widen(v_SGH))
    dscores_GRTS = weights_GRTS * (dweights_GRTS - (dout_TGRH * out_TGRH).sum(-1).permute(1, 2, 0)[..., None]) * scale
    dq_TGRH = torch.einsum("grij,jgh->igrh", dscores_GRTS, widen(k_SGH))
    dk_SGH, dv_SGH = (torch.einsum("grij,igrh->jgh", a, b) for a, b in ((dscores_GRTS, q_TGRH), (weights_GRTS, dout_TGRH)))
    return dq_TGRH.flatten(1, 2).to(q_TNH.dtype), dk_SGH.to(k_SGH.dtype), dv_SGH.to(v_SGH.dtype)
