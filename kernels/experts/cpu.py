"""Experts on a CPU, in C++: the rows of one expert at a time, each library call at a shape that its cache knows."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.linear import libraries

SOURCE = Path(__file__).with_suffix(".cpp")
ROWS = 16  # rows of an expert are padded to a multiple: oneDNN builds a kernel for each new shape and keeps only the last 1,024


def _bound(ids_TK: Tensor, n_experts: int) -> int:
    """Rows, padding included, that any routing of this many choices can need."""
    return ids_TK.numel() + n_experts * (ROWS - 1)


def _onednn(x: Tensor) -> list[bool]:
    """Whether oneDNN multiplies: x wᵀ, dy w, dyᵀ x."""
    return [x.dtype == torch.float32 and library == "onednn" for library in libraries().values()]


@torch.library.custom_op("reedling::experts", mutates_args=())
def _experts_op(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
                activation: str, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """The result, and the pre-activation [bound, F or 2F], of which backward needs the rows that the routing uses; [0, ...] if not kept."""
    hidden_rows = _bound(ids_TK, up_EFD.shape[0]) if keep_hidden else 0
    return native.operators(SOURCE).experts(x_TD, ids_TK, weights_TK, up_EFD, down_EDF, activation, ROWS, hidden_rows, _onednn(x_TD))


@torch.library.custom_op("reedling::experts_backward", mutates_args=())
def _experts_backward_op(dy_TD: Tensor, h_RF: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
                         activation: str, keep_hidden: bool, needs_up: bool, needs_down: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, up and down, the last two empty unless needed. The sorting is repeated: it is deterministic and cheaper than
    keeping its result."""
    return native.operators(SOURCE).experts_backward(dy_TD, h_RF, x_TD, ids_TK, weights_TK, up_EFD, down_EDF, activation, ROWS, needs_up,
                                                     needs_down, _onednn(x_TD))


def _gradient(weight: Tensor, needed: bool) -> Tensor:
    """Room for the gradient, or [E, 0]."""
    return torch.empty_like(weight) if needed else weight.new_empty(weight.shape[0], 0)


@_experts_op.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
      keep_hidden: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), x_TD.new_empty(_bound(ids_TK, up_EFD.shape[0]) if keep_hidden else 0, up_EFD.shape[1])


@_experts_backward_op.register_fake
def _(dy_TD: Tensor, h_RF: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
      activation: str, keep_hidden: bool, needs_up: bool, needs_down: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x_TD), weights_TK.new_empty(weights_TK.shape), _gradient(up_EFD, needs_up), _gradient(down_EDF, needs_down)


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
