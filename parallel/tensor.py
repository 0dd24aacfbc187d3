"""Tensor and sequence parallelism: heads, hidden columns and vocabulary are split over the ranks of ctx.tp_group, tokens between layers.

Outside of products each rank has its part of the tokens. A layer gathers them, multiplies with its own rows of the first matrix and its own
columns of the last, and the sum over the ranks comes back scattered by tokens. A gather's gradient is a scattered sum and the reverse, so
each rank's gradient of a weight is its share of the sum over all ranks, also for weights that every rank uses (norms, routers).
A weight arrives as the rank's part, or whole (see RULES in parallel/sharding.py) and is cut here. Without a group every function is the
plain one, on whole weights.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.activation import widen
from kernels.lookup import lookup
from model import lora
from model.context import Context
from model.linear import linear
from parallel.collectives import all_gather_grad, all_gather_start, reduce_scatter_grad, wait
from parallel.sharding import chunk_bounds

Part = tuple[int, int]  # first of something, and how many
CHUNK = 1024  # rows whose logits exist at a time


def own_part(whole: Part, group: ProcessGroup | None) -> Part:
    """This rank's part of heads, groups or columns: equal parts, or where there are fewer than ranks one, which several ranks share."""
    return whole if group is None else part_of(whole, group.size(), group.rank())


def part_of(whole: Part, ranks: int, rank: int) -> Part:
    """The part of any rank."""
    first, count = whole
    return first + rank * count // ranks, max(1, count // ranks)


def take(t: Any, parts: list[Part], dim: int = 0) -> Any:
    """Those rows (or columns) of t, one part after the other; t itself where it is no more than that."""
    if isinstance(t, lora.Adapted):
        return _take_adapted(t, parts, dim)
    if sum(count for _, count in parts) == t.shape[dim]:
        return t
    return torch.cat([t.narrow(dim, *part) for part in parts], dim) if len(parts) > 1 else t.narrow(dim, *parts[0])


def _take_adapted(t: lora.Adapted, parts: list[Part], dim: int) -> lora.Adapted:
    """Rows of the matrix are rows of b, columns of it are columns of a."""
    if dim == 0:
        magnitude_O = None if t.magnitude is None else take(t.magnitude, parts)
        return replace(t, weight=take(t.weight, parts), b=take(t.b, parts), magnitude=magnitude_O)
    return replace(t, weight=take(t.weight, parts, 1), a=take(t.a, parts, 1), first=parts[0][0])


def gather_tokens(x_TD: Tensor, ctx: Context) -> Tensor:
    """The tokens of all ranks of the group."""
    return x_TD if ctx.tp_group is None else all_gather_grad(x_TD.contiguous(), ctx.tp_group)


def sum_tokens(x_TD: Tensor, ctx: Context) -> Tensor:
    """The sum over the group's ranks, of which each keeps its own tokens."""
    return x_TD if ctx.tp_group is None else reduce_scatter_grad(x_TD.contiguous(), ctx.tp_group)


def output(y_TF: Tensor, weight_DF: Any, columns: list[Part], bias_D: Tensor | None, ctx: Context) -> Tensor:
    """y weightᵀ + bias, of which each rank has its columns: the sum over the ranks, of this rank's own tokens. [T, D]"""
    if ctx.tp_group is None:
        return linear(y_TF, weight_DF, bias_D)
    y_TD = sum_tokens(linear(y_TF, take(weight_DF, columns, 1)), ctx)
    return y_TD if bias_D is None else y_TD + bias_D


def embedding(table_VD: Tensor, rows: int, tokens_T: Tensor, ctx: Context) -> Tensor:
    """Rows of a table of `rows`, each looked up by the rank that has it; of this rank's own tokens."""
    if ctx.tp_group is None:
        return lookup(table_VD, tokens_T)
    first, count = chunk_bounds(rows, ctx.tp_group.size(), ctx.tp_group.rank())
    return sum_tokens(lookup(take(table_VD, [(first, count)]), tokens_T - first), ctx)


def cross_entropy(h_TD: Tensor, table_VD: Tensor, rows: int, vocabulary: int, labels_T: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's equal share of the summed cross-entropy of all labels that are not -100, each rank multiplying with its own part of the
    table.

    :param h_TD: and labels_T are those of all tokens of the group
    :param rows: of the table, of which those from `vocabulary` on are padding
    """
    first, count = chunk_bounds(rows, group.size(), group.rank())
    grads = [torch.is_grad_enabled() and t.requires_grad for t in (h_TD, table_VD)]
    return _VocabularyLoss.apply(h_TD, take(table_VD, [(first, count)]), labels_T, first, vocabulary, group, *grads)


class _VocabularyLoss(torch.autograd.Function):
    """Like kernels.linear_cross_entropy: forward computes the gradients for a loss of weight 1 while a chunk's logits are at hand, backward
    scales them. What the softmax needs of the other ranks, two numbers a row, is gathered once a chunk."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, table_VD: Tensor, labels_T: Tensor, first: int, vocabulary: int, group: ProcessGroup, h_grad: bool,
                table_grad: bool) -> Tensor:
        losses, dh = [], []
        dtable_VD = torch.zeros_like(table_VD, dtype=torch.promote_types(table_VD.dtype, torch.float32)) if table_grad else None
        for h, labels in zip(h_TD.split(CHUNK), labels_T.split(CHUNK), strict=True):
            logits = _logits(h, table_VD, vocabulary - first)
            ranks = wait(all_gather_start(_statistics(logits, labels - first), group)).unflatten(0, (group.size(), 2))
            lse, chosen = ranks[:, 0].logsumexp(0), ranks[:, 1].sum(0)
            losses.append(torch.where(labels == -100, 0, lse - chosen).sum())
            if h_grad or table_grad:
                dlogits = _gradient(logits, lse, labels, first).to(h.dtype)
            if h_grad:
                dh.append(dlogits @ table_VD)
            if dtable_VD is not None:
                dtable_VD = dtable_VD + dlogits.t() @ h
        ctx.save_for_backward(torch.cat(dh) if h_grad else None, None if dtable_VD is None else dtable_VD.to(table_VD.dtype))
        return torch.stack(losses).sum() / group.size()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return *(None if grad is None else grad * dloss for grad in ctx.saved_tensors), *[None] * 6


def _logits(h_TD: Tensor, table_VD: Tensor, real: int) -> Tensor:
    """-inf for rows of the table from `real` on, which are padding."""
    logits_TV = widen(h_TD @ table_VD.t())
    if real >= len(table_VD):
        return logits_TV
    return logits_TV.masked_fill(torch.arange(len(table_VD), device=h_TD.device) >= real, -torch.inf)


def _statistics(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials, and the chosen logit or 0 where it is another rank's. [2, T]"""
    here_T = (ids_T >= 0) & (ids_T < logits_TV.shape[1])
    chosen_T = logits_TV.gather(1, torch.where(here_T, ids_T, 0)[:, None])[:, 0]
    return torch.stack((logits_TV.logsumexp(1), torch.where(here_T, chosen_T, 0)))


def _gradient(logits_TV: Tensor, lse_T: Tensor, labels_T: Tensor, first: int) -> Tensor:
    """Of the loss of each labelled row, whose softmax has this logarithm of its sum over all ranks. [T, V]"""
    chosen_TV = torch.arange(logits_TV.shape[1], device=labels_T.device) == (labels_T - first)[:, None]
    return torch.where((labels_T == -100)[:, None], 0, torch.exp(logits_TV - lse_T[:, None]) - chosen_TV.to(lse_T.dtype))


def gated_rms_norm(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float, groups: int, group: ProcessGroup) -> Tensor:
    """model.norm.gated_rms_norm where each of fewer `groups` than ranks has its columns on several ranks, whose sums are added up."""
    sharing, wide_TI = group.size() // groups, widen(x_TI) * F.silu(widen(gate_TI))
    sums_T = all_gather_grad(wide_TI.square().sum(-1), group).view(groups, sharing, -1)[group.rank() // sharing].sum(0)
    inverse_T1 = torch.rsqrt(sums_T / (sharing * wide_TI.shape[1]) + eps)[:, None]
    return (wide_TI * inverse_T1 * widen(weight_I)).to(x_TI.dtype)
