"""Attention for CPUs: some query rows of a document at a time, with all keys that they see; the backward pass computes weights again."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.activation import widen

BLOCK = 128  # query rows that the CPU version handles at a time
_EVERYTHING = 1 << 40  # keys, more than there are


def attention_blocks(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                     causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return forward_op(q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, causal, scale, window)


def backward_blocks(dout_TNH: Tensor, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, out_TNH: Tensor, lse_NT: Tensor, cu_seqlens_U1: Tensor,
                    segments_T: Tensor, keys_2U: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return backward_op(dout_TNH, None, q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, causal, scale, None, out_TNH, lse_NT)


class _Block(NamedTuple):
    """Some query rows of one document and all keys that they see; `bias` [rows, last keys] is -inf where a pair is hidden."""

    rows: slice
    keys: slice
    bias: Tensor | None


def _blocks(cu_seqlens_U1: Tensor, keys_2U: Tensor | None, causal: bool, window: int | None) -> Iterator[_Block]:
    """Leaves out rows that see no key."""
    bounds = cu_seqlens_U1.tolist()
    key_starts, key_ends = (bounds[:-1], bounds[1:]) if keys_2U is None else keys_2U.tolist()
    for start, end, key_start, key_end in zip(bounds[:-1], bounds[1:], key_starts, key_ends, strict=True):
        to_key = key_end - end  # from a row to the key at which it sits
        reach = 0 if causal else _EVERYTHING if window is None else window - 1  # how far a row sees ahead
        sighted = max(start, key_start - to_key - reach) if key_start < key_end else end
        for first in range(sighted, end, BLOCK):
            last = min(first + BLOCK, end)
            before = key_start if window is None else max(key_start, first + to_key - window + 1)
            after = min(key_end, last + to_key + reach)
            biased = before if window is not None else first + to_key if causal else after  # first key of the bias
            ahead = torch.arange(biased, after) - torch.arange(first, last)[:, None] - to_key
            hidden = torch.zeros_like(ahead, dtype=torch.bool)
            if causal:
                hidden |= ahead > 0
            if window is not None:
                hidden |= ahead.abs() >= window
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if hidden.numel() else None
            yield _Block(slice(first, last), slice(before, after), bias)


def _scores(q_GMH: Tensor, k_GKH: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """fp32 or wider, -inf where hidden; M = heads a group * query rows, K keys."""
    scores_GMK = widen(_product(q_GMH, k_GKH.mT, scale))
    if bias is not None:
        scores_GMK.unflatten(1, (-1, len(bias)))[..., -bias.shape[1] :].add_(bias)
    return scores_GMK


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """a b * scale, rounded once."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def _by_group(x_TNH: Tensor, groups: int) -> Tensor:
    """[T, N, H] as [G, N / G * T, H]"""
    return x_TNH.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x_GMH: Tensor, heads: int) -> Tensor:
    """The inverse of _by_group."""
    return x_GMH.unflatten(1, (heads // len(x_GMH), -1)).permute(2, 0, 1, 3).flatten(1, 2)


@torch.library.custom_op("reedling::attention", mutates_args=(), device_types="cpu")
def forward_op(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, keys_2U: Tensor | None, causal: bool, scale: float,
               window: int | None) -> tuple[Tensor, Tensor]:
    heads, groups = q_TNH.shape[1], k_SGH.shape[1]
    k_GSH, v_GSH = (t.transpose(0, 1).contiguous() for t in (k_SGH, v_SGH))
    out_TNH, lse_NT = q_TNH.new_zeros(q_TNH.shape), widen(q_TNH.new_full((heads, len(q_TNH)), -torch.inf))
    for rows, keys, bias in _blocks(cu_seqlens_U1, keys_2U, causal, window):
        scores_GMK = _scores(_by_group(q_TNH[rows], groups), k_GSH[:, keys], scale, bias)
        weights_GMK = scores_GMK.softmax(-1)
        # the largest weight is exp(largest score - lse), and at least 1 / K
        lse_NT[:, rows] = (scores_GMK.amax(-1) - weights_GMK.amax(-1).log()).view(heads, -1)
        out_TNH[rows] = _by_row(weights_GMK.to(q_TNH.dtype) @ v_GSH[:, keys], heads)
    return out_TNH, lse_NT


@torch.library.custom_op("reedling::attention_backward", mutates_args=(), device_types="cpu")
def backward_op(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor,
                keys_2U: Tensor | None, causal: bool, scale: float, window: int | None, out_TNH: Tensor | None = None,
                lse_NT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the weights are computed again.

    :param out_TNH: and lse_NT, if given, are results over more keys than these
    """
    delta_NT = None if out_TNH is None else (widen(dout_TNH) * widen(out_TNH)).sum(-1).t()
    heads, groups = q_TNH.shape[1], k_SGH.shape[1]
    k_GSH, v_GSH = (t.transpose(0, 1).contiguous() for t in (k_SGH, v_SGH))
    dq_TNH, dk_GSH, dv_GSH = q_TNH.new_zeros(q_TNH.shape), torch.zeros_like(widen(k_GSH)), torch.zeros_like(widen(v_GSH))
    for rows, keys, bias in _blocks(cu_seqlens_U1, keys_2U, causal, window):
        q_GMH, dout_GMH = (_by_group(t[rows], groups) for t in (q_TNH, dout_TNH))
        scores_GMK, dweights_GMK = _scores(q_GMH, k_GSH[:, keys], scale, bias), widen(dout_GMH @ v_GSH[:, keys].mT)
        if lse_NT is None or delta_NT is None:
            weights_GMK = scores_GMK.softmax(-1)
            dscores_GMK = torch._softmax_backward_data(dweights_GMK, weights_GMK, -1, weights_GMK.dtype)
        else:
            lse_GM1, delta_GM1 = (t[:, rows].reshape(groups, -1, 1) for t in (lse_NT, delta_NT))
            weights_GMK = scores_GMK.sub_(lse_GM1).exp_()
            dscores_GMK = dweights_GMK.sub_(delta_GM1).mul_(weights_GMK)
        if dlse_NT is not None:
            dscores_GMK.addcmul_(weights_GMK, dlse_NT[:, rows].reshape(groups, -1, 1))
        weights_GMK, dscores_GMK = weights_GMK.to(q_TNH.dtype), dscores_GMK.to(q_TNH.dtype)
        dq_TNH[rows] = _by_row(_product(dscores_GMK, k_GSH[:, keys], scale), heads)
        dk_GSH[:, keys].add_(_product(dscores_GMK.mT, q_GMH, scale))
        dv_GSH[:, keys].add_(weights_GMK.mT @ dout_GMH)
    dk_SGH, dv_SGH = (t.transpose(0, 1).to(q_TNH.dtype).contiguous() for t in (dk_GSH, dv_GSH))
    return dq_TNH, dk_SGH, dv_SGH


@forward_op.register_fake
def _(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, keys_2U: Tensor | None, causal: bool, scale: float,
      window: int | None) -> tuple[Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), widen(q_TNH.new_empty((q_TNH.shape[1], q_TNH.shape[0])))


@backward_op.register_fake
def _(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor,
      keys_2U: Tensor | None, causal: bool, scale: float, window: int | None, out_TNH: Tensor | None = None,
      lse_NT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), k_SGH.new_empty(k_SGH.shape), v_SGH.new_empty(v_SGH.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TNH: Tensor | None, dlse_NT: Tensor | None) -> tuple[Tensor | None, ...]:
    dout_TNH = torch.zeros_like(ctx.saved_tensors[0]) if dout_TNH is None else dout_TNH
    return *backward_op(dout_TNH, dlse_NT, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_save)
