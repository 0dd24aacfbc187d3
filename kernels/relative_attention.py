"""Attention with relative positions (Transformer-XL) among the frames of each utterance of a flat row; no frame sees another utterance.

Score of query i and key j: ((q_i + u) . k_j + (q_i + v) . p_(i - j)) / sqrt(H).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import widen
from kernels.ragged import Layout, pad, unpad

_MASKED = -1e30  # finite, so that unused utterances, which see nothing, give no NaN


def relative_attention(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                       layout: Layout, *, implementation: str = "auto") -> Tensor:
    """[A, N, H], zeros outside utterances. The softmax is in fp32.

    :param table_RNH: p for the distances L - 1, ..., -(L - 1) of query minus key, L = layout.frames
    :param bias_u_NH: u above; bias_v_NH is v
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = "ragged" if q_ANH.device.type == "cpu" else "dense"
    run = IMPLEMENTATIONS[implementation]
    return run(q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH, layout)


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


def _relative_attention_dense(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
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


def _relative_attention_ragged(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                               layout: Layout) -> Tensor:
    """Utterances one after another, each at its own length: for CPUs, where lengths can be looked at."""
    return forward_op(q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH, layout.starts_U, layout.lengths_U)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Layout], Tensor]] = {
    "reference": relative_attention_reference, "dense": _relative_attention_dense, "ragged": _relative_attention_ragged}


def _relative_shift(x: Tensor) -> Tensor:
    """[..., L, 2 L - 1] by distance L - 1, ..., -(L - 1) -> [..., L, L] by key: y[i, j] = x[i, L - 1 - i + j].

    With a column of zeros in front the wanted entries of row i start at L - i; read in rows of one more entry less, they align.
    """
    length, width = x.shape[-2:]
    padded = F.pad(x, (1, 0)).flatten(-2)
    return padded[..., length:].unflatten(-1, (length, width))[..., :length]


@torch.library.custom_op("reedling::relative_attention", mutates_args=(), device_types="cpu")
def forward_op(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor, starts_U: Tensor,
               lengths_U: Tensor) -> Tensor:
    q_NAH, k_NAH, v_NAH, table_NRH = _by_head(q_ANH, k_ANH, v_ANH, table_RNH)
    u_N1H, v_N1H = bias_u_NH[:, None], bias_v_NH[:, None]
    out_NAH = torch.zeros_like(q_NAH)
    for own, near in _utterances(starts_U, lengths_U, table_RNH):
        weights = _weights(q_NAH[:, own] + u_N1H, q_NAH[:, own] + v_N1H, k_NAH[:, own], table_NRH[:, near])
        out_NAH[:, own] = weights.to(v_NAH.dtype) @ v_NAH[:, own]
    return out_NAH.transpose(0, 1).contiguous()


@torch.library.custom_op("reedling::relative_attention_backward", mutates_args=(), device_types="cpu")
def backward_op(dout_ANH: Tensor, q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                starts_U: Tensor, lengths_U: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six inputs; the weights are computed again."""
    dout_NAH, q_NAH, k_NAH, v_NAH, table_NRH = _by_head(dout_ANH, q_ANH, k_ANH, v_ANH, table_RNH)
    dq_NAH, dk_NAH, dv_NAH = (torch.zeros_like(t) for t in (q_NAH, k_NAH, v_NAH))
    dtable_NRH, du_NH, db_NH = (torch.zeros_like(widen(t)) for t in (table_NRH, bias_u_NH, bias_v_NH))
    for own, near in _utterances(starts_U, lengths_U, table_RNH):
        to_content, to_position = q_NAH[:, own] + bias_u_NH[:, None], q_NAH[:, own] + bias_v_NH[:, None]
        weights = _weights(to_content, to_position, k_NAH[:, own], table_NRH[:, near])
        dweights = widen(dout_NAH[:, own] @ v_NAH[:, own].mT)
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype) / math.sqrt(q_ANH.shape[-1])
        weights, dscores = weights.to(v_NAH.dtype), dscores.to(v_NAH.dtype)
        dposition = dscores.new_zeros(*dscores.shape[:2], 2 * dscores.shape[1] - 1)
        _aligned(dposition).copy_(dscores)
        dcontent, dposition_q = dscores @ k_NAH[:, own], dposition @ table_NRH[:, near]
        dq_NAH[:, own] = dcontent + dposition_q
        dk_NAH[:, own] = dscores.mT @ to_content
        dv_NAH[:, own] = weights.mT @ dout_NAH[:, own]
        dtable_NRH[:, near] += dposition.mT @ to_position
        du_NH += dcontent.sum(1)
        db_NH += dposition_q.sum(1)
    dq, dk, dv, dtable = (t.transpose(0, 1).to(q_ANH.dtype).contiguous() for t in (dq_NAH, dk_NAH, dv_NAH, dtable_NRH))
    return dq, dk, dv, dtable, du_NH.to(bias_u_NH.dtype), db_NH.to(bias_v_NH.dtype)


def _by_head(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(0, 1).contiguous() for t in tensors)


def _utterances(starts_U: Tensor, lengths_U: Tensor, table_RNH: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of each utterance, and of the table for the distances within it."""
    frames = (len(table_RNH) + 1) // 2
    for start, length in zip(starts_U.tolist(), lengths_U.tolist(), strict=True):
        if length > 0:
            yield slice(start, start + length), slice(frames - length, frames + length - 1)


def _weights(to_content: Tensor, to_position: Tensor, k_NLH: Tensor, table_NRH: Tensor) -> Tensor:
    """Softmax over keys [N, L, L] of one utterance, fp32 or wider."""
    scores = widen(to_content @ k_NLH.mT) + _aligned(to_position @ table_NRH.mT)
    return torch.softmax(scores / math.sqrt(k_NLH.shape[-1]), -1)


def _aligned(x: Tensor) -> Tensor:
    """The view that _relative_shift copies, of a contiguous [N, L, 2 L - 1]."""
    heads, length, width = x.shape
    return x.as_strided((heads, length, length), (length * width, width - 1, 1), length - 1)


@forward_op.register_fake
def _(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor, starts_U: Tensor,
      lengths_U: Tensor) -> Tensor:
    return q_ANH.new_empty(q_ANH.shape)


@backward_op.register_fake
def _(dout_ANH: Tensor, q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
      starts_U: Tensor, lengths_U: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, table, u, b = (t.new_empty(t.shape) for t in (q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH))
    return q, k, v, table, u, b


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout_ANH: Tensor) -> tuple[Tensor | None, ...]:
    return (*backward_op(dout_ANH, *ctx.saved_tensors), None, None)


forward_op.register_autograd(_backward, setup_context=_save)
