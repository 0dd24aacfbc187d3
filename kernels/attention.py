"""Softmax attention inside the documents of a packed row; a key and value head may serve several query heads."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from kernels.activation import widen

BLOCK = 128  # query rows that the CPU version handles at a time


def attention(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, *, segments_T: Tensor, causal: bool = True,
              scale: float | None = None, window: int | None = None, implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v [T, N, H] in q's dtype, and the natural logarithm of the softmax's denominator [N, T], fp32 or wider.

    Rows beyond the last document give 0, a logarithm of -inf, and no gradient.

    :param k_TGH: query head n reads key and value head n // (N / G)
    :param cu_seqlens_U1: document u owns rows cu_seqlens[u] : cu_seqlens[u + 1]
    :param segments_T: the same row by row: number of the row's document, U or more beyond the last
    :param causal: row i sees the rows j <= i of its document
    :param scale: 1 / sqrt(H) unless given
    :param window: row i sees the rows with |i - j| < window
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = "blocks" if q_TNH.device.type == "cpu" else "reference"
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    return IMPLEMENTATIONS[implementation](q_TNH, k_TGH, v_TGH, cu_seqlens_U1, segments_T, causal, scale, window)


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


def _attention_blocks(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, causal: bool, scale: float,
                      window: int | None) -> tuple[Tensor, Tensor]:
    return forward_op(q_TNH, k_TGH, v_TGH, cu_seqlens_U1, causal, scale, window)


def _attention_varlen(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, causal: bool, scale: float,
                      window: int | None) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention, which has no gradient of the logarithm and leaves rows without a document as the memory was.

    Here those rows are one more document, so that everything it returns has been computed, and are cleared afterwards.
    """
    rows = len(q_TNH)
    bounds = F.pad(cu_seqlens_U1, (0, 1), value=rows)
    reach = -1 if window is None else window - 1
    out_TNH, lse_NT = varlen.varlen_attn(q_TNH, k_TGH, v_TGH, bounds, bounds, rows, rows, return_aux=varlen.AuxRequest(lse=True),
                                         scale=scale, window_size=(reach, 0 if causal else reach), enable_gqa=True)
    real_T = segments_T < len(cu_seqlens_U1) - 1
    return torch.where(real_T[:, None, None], out_TNH, 0), torch.where(real_T, lse_NT.detach(), -torch.inf)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool, float, int | None], tuple[Tensor, Tensor]]] = {
    "reference": attention_reference, "blocks": _attention_blocks, "varlen": _attention_varlen}


class _Block(NamedTuple):
    """Some query rows of one document and all keys that they see; `bias` [rows, last keys] is -inf where a pair is hidden."""

    rows: slice
    keys: slice
    bias: Tensor | None


def _blocks(cu_seqlens_U1: Tensor, causal: bool, window: int | None) -> Iterator[_Block]:
    for start, end in itertools.pairwise(cu_seqlens_U1.tolist()):
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            before = start if window is None else max(start, first - window + 1)
            after = last if causal else end if window is None else min(end, last + window - 1)
            biased = after if not causal and window is None else first if window is None else before  # first key of the bias
            ahead = torch.arange(biased, after) - torch.arange(first, last)[:, None]
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
def forward_op(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, causal: bool, scale: float,
               window: int | None) -> tuple[Tensor, Tensor]:
    heads, groups = q_TNH.shape[1], k_TGH.shape[1]
    k_GTH, v_GTH = (t.transpose(0, 1).contiguous() for t in (k_TGH, v_TGH))
    out_TNH, lse_NT = q_TNH.new_zeros(q_TNH.shape), widen(q_TNH.new_full((heads, len(q_TNH)), -torch.inf))
    for rows, keys, bias in _blocks(cu_seqlens_U1, causal, window):
        scores_GMK = _scores(_by_group(q_TNH[rows], groups), k_GTH[:, keys], scale, bias)
        weights_GMK = scores_GMK.softmax(-1)
        # the largest weight is exp(largest score - lse), and at least 1 / K
        lse_NT[:, rows] = (scores_GMK.amax(-1) - weights_GMK.amax(-1).log()).view(heads, -1)
        out_TNH[rows] = _by_row(weights_GMK.to(q_TNH.dtype) @ v_GTH[:, keys], heads)
    return out_TNH, lse_NT


@torch.library.custom_op("reedling::attention_backward", mutates_args=(), device_types="cpu")
def backward_op(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, causal: bool,
                scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the weights are computed again."""
    heads, groups = q_TNH.shape[1], k_TGH.shape[1]
    k_GTH, v_GTH = (t.transpose(0, 1).contiguous() for t in (k_TGH, v_TGH))
    dq_TNH, dk_GTH, dv_GTH = q_TNH.new_zeros(q_TNH.shape), torch.zeros_like(widen(k_GTH)), torch.zeros_like(widen(v_GTH))
    for rows, keys, bias in _blocks(cu_seqlens_U1, causal, window):
        q_GMH, dout_GMH = (_by_group(t[rows], groups) for t in (q_TNH, dout_TNH))
        weights_GMK = _scores(q_GMH, k_GTH[:, keys], scale, bias).softmax(-1)
        dweights_GMK = widen(dout_GMH @ v_GTH[:, keys].mT)
        dscores_GMK = torch._softmax_backward_data(dweights_GMK, weights_GMK, -1, weights_GMK.dtype)
        if dlse_NT is not None:
            dscores_GMK.addcmul_(weights_GMK, dlse_NT[:, rows].reshape(groups, -1, 1))
        weights_GMK, dscores_GMK = weights_GMK.to(q_TNH.dtype), dscores_GMK.to(q_TNH.dtype)
        dq_TNH[rows] = _by_row(_product(dscores_GMK, k_GTH[:, keys], scale), heads)
        dk_GTH[:, keys].add_(_product(dscores_GMK.mT, q_GMH, scale))
        dv_GTH[:, keys].add_(weights_GMK.mT @ dout_GMH)
    dk_TGH, dv_TGH = (t.transpose(0, 1).to(q_TNH.dtype).contiguous() for t in (dk_GTH, dv_GTH))
    return dq_TNH, dk_TGH, dv_TGH


@forward_op.register_fake
def _(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, causal: bool, scale: float,
      window: int | None) -> tuple[Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), widen(q_TNH.new_empty((q_TNH.shape[1], q_TNH.shape[0])))


@backward_op.register_fake
def _(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, cu_seqlens_U1: Tensor, causal: bool,
      scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), k_TGH.new_empty(k_TGH.shape), v_TGH.new_empty(v_TGH.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TNH: Tensor | None, dlse_NT: Tensor | None) -> tuple[Tensor | None, ...]:
    dout_TNH = torch.zeros_like(ctx.saved_tensors[0]) if dout_TNH is None else dout_TNH
    return *backward_op(dout_TNH, dlse_NT, *ctx.saved_tensors, *ctx.options), None, None, None, None


forward_op.register_autograd(_backward, setup_context=_save)
