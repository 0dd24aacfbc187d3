"""Attention for CPUs, in C++: some query rows of a document at a time, with all keys that they see."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.activation import widen

SOURCE = Path(__file__).with_suffix(".cpp")


def attention_blocks(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, segments_T: Tensor, keys_2U: Tensor | None,
                     causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return forward_op(q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, causal, scale, window)


def backward_blocks(dout_TNH: Tensor, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, out_TNH: Tensor, lse_NT: Tensor, cu_seqlens_U1: Tensor,
                    segments_T: Tensor, keys_2U: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return backward_op(dout_TNH, None, q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, lse_NT, out_TNH, causal, scale, None)


@torch.library.custom_op("reedling::attention", mutates_args=(), device_types="cpu")
def forward_op(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, keys_2U: Tensor | None, causal: bool, scale: float,
               window: int | None) -> tuple[Tensor, Tensor]:
    return native.operators(SOURCE).attention(q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, causal, scale, window)


@torch.library.custom_op("reedling::attention_backward", mutates_args=(), device_types="cpu")
def backward_op(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor,
                keys_2U: Tensor | None, lse_NT: Tensor, out_TNH: Tensor | None, causal: bool, scale: float,
                window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the weights are computed again.

    :param out_TNH: the result where it, and lse_NT, are over more keys than these
    """
    delta_NT = None if out_TNH is None else (widen(dout_TNH) * widen(out_TNH)).sum(-1).t()
    return native.operators(SOURCE).attention_backward(dout_TNH, dlse_NT, q_TNH, k_SGH, v_SGH, cu_seqlens_U1, keys_2U, causal, scale,
                                                       window, lse_NT, delta_NT)


@forward_op.register_fake
def _(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor, keys_2U: Tensor | None, causal: bool, scale: float,
      window: int | None) -> tuple[Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), widen(q_TNH.new_empty((q_TNH.shape[1], q_TNH.shape[0])))


@backward_op.register_fake
def _(dout_TNH: Tensor, dlse_NT: Tensor | None, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, cu_seqlens_U1: Tensor,
      keys_2U: Tensor | None, lse_NT: Tensor, out_TNH: Tensor | None, causal: bool, scale: float,
      window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), k_SGH.new_empty(k_SGH.shape), v_SGH.new_empty(v_SGH.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout_TNH: Tensor | None, dlse_NT: Tensor | None) -> tuple[Tensor | None, ...]:
    q_TNH, *others = ctx.saved_tensors  # once: activation checkpointing has them no second time
    dout_TNH = torch.zeros_like(q_TNH) if dout_TNH is None else dout_TNH
    return *backward_op(dout_TNH, dlse_NT, q_TNH, *others, None, *ctx.options), None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_save)
