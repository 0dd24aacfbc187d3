"""Relative attention for CPUs: one utterance after another, each at its own length; the backward pass computes the weights again."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.activation import widen
from kernels.ragged import Layout


def relative_attention_ragged(q_ANH: Tensor, k_ANH: Tensor, v_ANH: Tensor, table_RNH: Tensor, bias_u_NH: Tensor, bias_v_NH: Tensor,
                              layout: Layout) -> Tensor:
    """Utterances one after another, each at its own length: for CPUs, where lengths can be looked at."""
    return forward_op(q_ANH, k_ANH, v_ANH, table_RNH, bias_u_NH, bias_v_NH, layout.starts_U, layout.lengths_U)


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
