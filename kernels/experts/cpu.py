"""Experts on a CPU: one matrix product an expert and layer, each library call at a shape that its cache knows."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import activate_backward, activate_wide, widen
from kernels.experts.routing import expert_keys
from kernels.linear import product
from kernels.side_by_side import side_by_side

ROWS = 16  # rows of an expert are padded to a multiple: oneDNN builds a kernel for each new shape and keeps only the last 1,024


class _Route(NamedTuple):
    """Which rows belong to which expert: `counts[e]` rows each, padded to `sizes[e]`, a multiple of ROWS, one expert after the other."""

    counts: list[int]
    sizes: list[int]
    choice_R: Tensor  # int64, the flat choice (token * K + k) that a row serves; 0 for padding
    slots_TK: Tensor  # int64, row of each choice; R, one beyond the last, where it has no expert here


def _route(ids_TK: Tensor, n_experts: int) -> _Route:
    keys = expert_keys(ids_TK, n_experts)
    counts = torch.bincount(keys, minlength=n_experts + 1)[:n_experts]
    sizes = -(-counts // ROWS) * ROWS
    rows, used = int(sizes.sum()), int(counts.sum())
    choices = torch.argsort(keys, stable=True)[:used]
    shift = (sizes - counts).cumsum(0) - (sizes - counts)  # padding before each expert
    row = torch.arange(used) + shift[keys[choices]]
    choice_R = torch.zeros(rows, dtype=torch.int64)
    choice_R[row] = choices
    slots = torch.full((ids_TK.numel(),), rows)
    slots[choices] = row
    return _Route(counts.tolist(), sizes.tolist(), choice_R, slots.view_as(ids_TK))


def _bound(ids_TK: Tensor, n_experts: int) -> int:
    """Rows, padding included, that any routing of this many choices can need."""
    return ids_TK.numel() + n_experts * (ROWS - 1)


def _take(x_TD: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Rows of x, the first `count` as `tokens` says, the padding zero."""
    rows = x_TD.index_select(0, tokens)
    rows[count:].zero_()
    return rows


def _combine(rows_RD: Tensor, slots_TK: Tensor) -> Tensor:
    """Sum of each token's rows, accumulated in fp32; the last row of rows_RD stands for absent choices and is zeroed. [T, D]"""
    rows_RD[-1].zero_()
    return F.embedding_bag(slots_TK, rows_RD, mode="sum")


@torch.library.custom_op("reedling::experts", mutates_args=())
def _experts_op(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
                activation: str, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """The result, and the pre-activation [bound, F or 2F], of which backward needs the rows that the routing uses; [0, ...] if not kept."""
    route = _route(ids_TK, up_EFD.shape[0])
    rows = len(route.choice_R)
    h_RF = x_TD.new_empty(_bound(ids_TK, up_EFD.shape[0]) if keep_hidden else rows, up_EFD.shape[1])
    y_RD = x_TD.new_empty(rows + 1, down_EDF.shape[1])

    def one(count: int, tokens: Tensor, weight: Tensor, h: Tensor, y: Tensor, up: Tensor, down: Tensor) -> None:
        if count:
            product("nt", _take(x_TD, tokens, count), up, out=h)
            product("nt", activate_wide(widen(h), activation).mul_(weight).to(x_TD.dtype), down, out=y)

    by_row = [t.split(route.sizes) for t in (*_token_and_weight(route, weights_TK), h_RF[:rows], y_RD[:-1])]
    side_by_side(one, list(zip(route.counts, *by_row, up_EFD.unbind(), down_EDF.unbind(), strict=True)), route.counts)
    return _combine(y_RD, route.slots_TK), h_RF if keep_hidden else h_RF.new_empty(0, up_EFD.shape[1])


@torch.library.custom_op("reedling::experts_backward", mutates_args=())
def _experts_backward_op(dy_TD: Tensor, h_RF: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
                         activation: str, keep_hidden: bool, needs_up: bool, needs_down: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, up and down, the last two empty unless needed. The sorting is repeated: it is deterministic and cheaper than
    keeping its result."""
    route = _route(ids_TK, up_EFD.shape[0])
    rows = len(route.choice_R)
    dx_RD = x_TD.new_empty(rows + 1, x_TD.shape[1])
    h_RF = h_RF[:rows] if keep_hidden else h_RF.new_empty(rows, up_EFD.shape[1])
    dweights_R = weights_TK.new_zeros(rows + 1)
    dup_EFD, ddown_EDF = _gradient(up_EFD, needs_up), _gradient(down_EDF, needs_down)

    def one(count: int, tokens: Tensor, weight: Tensor, h: Tensor, dx: Tensor, dweight: Tensor, up: Tensor, down: Tensor, dup: Tensor,
            ddown: Tensor) -> None:
        if not count:
            dup.zero_()
            ddown.zero_()
            return
        x, dy = _take(x_TD, tokens, count), _take(dy_TD, tokens, count)
        h = widen(h if keep_hidden else product("nt", x, up, out=h))
        act = activate_wide(h, activation)
        dact = widen(product("nn", dy, down))  # before the router's weight
        torch.sum(act * dact, -1, out=dweight)
        if needs_down:
            product("tn", dy, act.mul_(weight).to(x.dtype), out=ddown)
        dh = activate_backward(h, dact.mul_(weight), activation).to(x.dtype)
        if needs_up:
            product("tn", dh, x, out=dup)
        product("nn", dh, up, out=dx)

    by_row = [t.split(route.sizes) for t in (*_token_and_weight(route, weights_TK), h_RF, dx_RD[:-1], dweights_R[:-1])]
    by_expert = [t.unbind() for t in (up_EFD, down_EDF, dup_EFD, ddown_EDF)]
    side_by_side(one, list(zip(route.counts, *by_row, *by_expert, strict=True)), route.counts)
    return _combine(dx_RD, route.slots_TK), dweights_R[route.slots_TK], dup_EFD, ddown_EDF


def _gradient(weight: Tensor, needed: bool) -> Tensor:
    """Room for the gradient, or [E, 0], which can be split by expert like it."""
    return torch.empty_like(weight) if needed else weight.new_empty(weight.shape[0], 0)


def _token_and_weight(route: _Route, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Token [R] and router's weight [R, 1] of each row."""
    return route.choice_R // weights_TK.shape[1], weights_TK.flatten()[route.choice_R, None]


@_experts_op.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
      keep_hidden: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), x_TD.new_empty(_bound(ids_TK, up_EFD.shape[0]) if keep_hidden else 0, up_EFD.shape[1])


@_experts_backward_op.register_fake
def _(dy_TD: Tensor, h_RF: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
      activation: str, keep_hidden: bool, needs_up: bool, needs_down: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), _gradient(up_EFD, needs_up), _gradient(down_EDF, needs_down)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.keep_hidden = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy_TD: Tensor, dh_RF: None) -> tuple[Tensor | None, ...]:
    needs_up, needs_down = ctx.needs_input_grad[3:5]
    dx, dweights, dup, ddown = _experts_backward_op(dy_TD.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.keep_hidden, needs_up,
                                                      needs_down)
    return dx, None, dweights, dup if needs_up else None, ddown if needs_down else None, None, None


_experts_op.register_autograd(_backward, setup_context=_save)


def experts_cpu(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
                keep_hidden: bool = True) -> Tensor:
    return _experts_op(x_TD.contiguous(), ids_TK, weights_TK, up_EFD.contiguous(), down_EDF.contiguous(), activation, keep_hidden)[0]
