"""What the operators have in common: their forward returns the gradients for a loss of weight 1, their backward scales them."""

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def complete(operator: CustomOpDef) -> CustomOpDef:
    """Adds shapes and gradients to an operator with the arguments of _fake that returns loss, count, dh and dweight."""
    operator.register_fake(_fake)
    operator.register_autograd(_backward, setup_context=_save)
    return operator


def _fake(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, ignore_index: int, label_smoothing: float, z_loss: float,
          soft_cap: float | None, h_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = h_TD.new_empty((), dtype=torch.promote_types(h_TD.dtype, torch.float32))
    dh, dweight = (torch.empty_like(t) if grad else t.new_empty(0) for t, grad in ((h_TD, h_grad), (weight_VD, weight_grad)))
    return loss, labels_T.new_empty((), dtype=torch.int64), dh, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.grads = inputs[-2:]
    ctx.save_for_backward(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads = [grad * dloss if needed and dloss is not None else None for grad, needed in zip(ctx.saved_tensors, ctx.grads, strict=True)]
    return (*grads, *[None] * 8)
