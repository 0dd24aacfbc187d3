"""Attention with relative positions (Transformer-XL) among the frames of each utterance of a flat row; no frame sees another utterance.

Score of query i and key j: ((q_i + u) . k_j + (q_i + v) . p_(i - j)) / sqrt(H).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ragged import pad, unpad

# Finite, so that unused utterances, which see nothing, give no NaN.
_MASKED = -1e30


def relative_attention(
    q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
    starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor, frames: int, implementation: str = "auto",
) -> Tensor:
    """[A, N, H], zeros outside utterances.

    table_RNH holds p for the distances frames - 1, ..., -(frames - 1) of query minus key; utterances are no longer than `frames`.
    Boundaries as in kernels/ragged.py. The softmax is in fp32.
    """
    run = IMPLEMENTATIONS["dense" if implementation == "auto" else implementation]
    return run(q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH, starts_U, lengths_U, segments_A, positions_A, frames)


def relative_attention_reference(
    q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
    starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor, frames: int,
) -> Tensor:
    """One utterance at a time, every score from the definition."""
    out = torch.zeros_like(q_ANH)
    for start, length in zip(starts_U.tolist(), lengths_U.tolist(), strict=True):
        own = slice(start, start + length)
        q, k, v = q_ANH[own], k_ANH[own], v_ANH[own]
        place = torch.arange(length, device=q.device)
        p = table_RNH[frames - 1 - (place[:, None] - place)]
        scores = torch.einsum("inh,jnh->nij", q + bias_u_NH, k) + torch.einsum("inh,ijnh->nij", q + bias_v_NH, p)
        weights = torch.softmax(scores / math.sqrt(q.shape[-1]), -1)
        out = torch.cat((out[:start], torch.einsum("nij,jnh->inh", weights, v), out[start + length :]))
    return out


def _dense(
    q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
    starts_U: Tensor, lengths_U: Tensor, segments_A: Tensor, positions_A: Tensor, frames: int,
) -> Tensor:
    """Utterances side by side, each padded to `frames`."""
    qkv = pad(torch.stack((q_ANH, k_ANH, v_ANH), 1), starts_U, lengths_U, segments_A, positions_A, frames)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [U, N, L, H]
    content = (q + bias_u_NH[:, None]) @ k.mT
    # One product a head for all utterances: [N, U * L, H] @ [N, H, R].
    rows = (q + bias_v_NH[:, None]).transpose(0, 1).flatten(1, 2)
    position = (rows @ table_RNH.permute(1, 2, 0)).unflatten(1, (-1, frames)).transpose(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (content.to(wide) + _relative_shift(position).to(wide)) / math.sqrt(q.shape[-1])
    seen = torch.arange(frames, device=q.device) < lengths_U[:, None, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, _MASKED), -1).to(v.dtype)
    return unpad((weights @ v).transpose(1, 2), starts_U, lengths_U, segments_A, positions_A)


def _relative_shift(x: Tensor) -> Tensor:
    """[..., L, 2 L - 1] by distance L - 1, ..., -(L - 1) -> [..., L, L] by key: y[i, j] = x[i, L - 1 - i + j].

    With a column of zeros in front the wanted entries of row i start at L - i; read in rows of one more entry less, they align.
    """
    length, width = x.shape[-2:]
    padded = F.pad(x, (1, 0)).flatten(-2)
    return padded[..., length:].unflatten(-1, (length, width))[..., :length]


IMPLEMENTATIONS = {"reference": relative_attention_reference, "dense": _dense}
