"""Relative attention from its definition, and as products of padded matrices."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.ragged import Layout, pad, unpad

_MASKED = -1e30  # finite, so that unused utterances, which see nothing, give no NaN


def relative_attention_reference(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                                 layout: Layout) -> Tensor:
    """One utterance at a time, every score from the definition."""
    out = torch.zeros_like(q_ANH)
    for start, length in zip(layout.starts_U.tolist(), layout.lengths_U.tolist(), strict=True):
        own = slice(start, start + length)
        q, k, v = q_ANH[own], k_ANH[own], v_ANH[own]
        place = torch.arange(length, device=q.device)
        p = table_RNH[layout.frames - 1 - (place[:, None] - place)]
        scores = torch.einsum("inh,jnh->nij", q + bias_u_NH, k) + torch.einsum("inh,ijnh->nij", q + bias_v_NH, p)
        weights = torch.softmax(scores / math.sqrt(q.shape[-1]), -1)
        out = torch.cat((out[:start], torch.einsum("nij,jnh->inh", weights, v), out[start + length :]))
    return out


def relative_attention_dense(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                             layout: Layout) -> Tensor:
    """Utterances side by side, each padded to the longest that the row may hold."""
    q, k, v = pad(torch.stack((q_ANH, k_ANH, v_ANH), 1), layout).permute(2, 0, 3, 1, 4)  # each [U, N, L, H]
    content = (q + bias_u_NH[:, None]) @ k.mT
    # One product a head for all utterances: [N, U * L, H] @ [N, H, R].
    rows = (q + bias_v_NH[:, None]).transpose(0, 1).flatten(1, 2)
    position = (rows @ table_RNH.permute(1, 2, 0)).unflatten(1, (-1, layout.frames)).transpose(0, 1)
    scores = (widen(content) + widen(_relative_shift(position))) / math.sqrt(q.shape[-1])
    seen = torch.arange(layout.frames, device=q.device) < layout.lengths_U[:, None, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, _MASKED), -1).to(v.dtype)
    return unpad((weights @ v).transpose(1, 2), layout)


def _relative_shift(x: Tensor) -> Tensor:
    """[..., L, 2 L - 1] by distance L - 1, ..., -(L - 1) -> [..., L, L] by key: y[i, j] = x[i, L - 1 - i + j].

    With a column of zeros in front the wanted entries of row i start at L - i; read in rows of one more entry less, they align.
    """
    length, width = x.shape[-2:]
    padded = F.pad(x, (1, 0)).flatten(-2)
    return padded[..., length:].unflatten(-1, (length, width))[..., :length]
