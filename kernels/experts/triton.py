"""Experts in Triton: two grouped products whose loads gather the tokens and whose epilogues hold the activation, then a gather and a sum.

Backward keeps the input, the routing and the pre-activations, unless it is to compute these again. The gradient of the activation
recomputes the activation in the epilogue of its own product, where the router's gradient falls off as a sum over each row. Nothing is
added atomically, so results repeat bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import expansion
from kernels.experts.grouped import multiply_groups, multiply_rows, operand_rows, plan, row_tile, swizzle, tile_product
from kernels.experts.routing import route


@triton.jit
def _relu2(h):
    return tl.where(h < 0, 0.0, h * h)  # NaN stays NaN, as in relu; a maximum would hide it


@triton.jit
def _swiglu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _up_kernel(x_ptr, token_ptr, up_ptr, h_ptr, act_ptr, tiles_ptr, count_ptr, f, d,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
               ACTIVATION: tl.constexpr, KEEP: tl.constexpr):
    """Pre-activation, where it is kept, and activation. For swiglu the product's columns are gate and up in turn: a thread has both."""
    WIDTH: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    COLUMNS: tl.constexpr = BLOCK_N // WIDTH
    m_tiles, n_tiles = tl.load(count_ptr), tl.cdiv(f, COLUMNS)
    for work in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        tile, column_tile = swizzle(work, m_tiles, n_tiles, GROUP_M)
        expert, row, stop = row_tile(tiles_ptr, tile, BLOCK_M)
        j = tl.arange(0, BLOCK_N)
        up_row = (column_tile * COLUMNS + j // WIDTH) % f + j % WIDTH * f
        total = tile_product(x_ptr, up_ptr + expert * WIDTH * f * d, operand_rows(token_ptr, row, stop, True), up_row,
                             d, d, 1, d, BLOCK_K, EVEN_K)
        h = total.to(h_ptr.dtype.element_ty)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < stop)[:, None] & (column < f)[None, :]
        h_ptrs = h_ptr + row.to(tl.int64)[:, None] * f * WIDTH + column[None, :]
        if ACTIVATION == "swiglu":
            gate, up = tl.split(tl.reshape(h, (BLOCK_M, COLUMNS, 2)))
            if KEEP:
                tl.store(h_ptrs, gate, mask=inside)
                tl.store(h_ptrs + f, up, mask=inside)
            act = _swiglu(gate.to(tl.float32), up.to(tl.float32))
        else:
            if KEEP:
                tl.store(h_ptrs, h, mask=inside)
            act = _relu2(h.to(tl.float32))
        act_ptrs = act_ptr + row.to(tl.int64)[:, None] * f + column[None, :]
        tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_backward_kernel(dy_ptr, token_ptr, choice_ptr, weights_ptr, down_ptr, h_ptr, dh_ptr, act_ptr, dweights_ptr, tiles_ptr,
                            count_ptr, f, d, n_choices, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                            GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr):
    """Gradient of the pre-activation, the weighted activation, and these columns' part of the gradient of the router's weights."""
    m_tiles, n_tiles = tl.load(count_ptr), tl.cdiv(f, BLOCK_N)
    for work in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        tile, column_tile = swizzle(work, m_tiles, n_tiles, GROUP_M)
        expert, row, stop = row_tile(tiles_ptr, tile, BLOCK_M)
        down_column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)) % f
        dact = tile_product(dy_ptr, down_ptr + expert * d * f, operand_rows(token_ptr, row, stop, True), down_column,
                            d, d, f, 1, BLOCK_K, EVEN_K)
        choice = tl.load(choice_ptr + row, mask=row < stop, other=0)
        weight = tl.load(weights_ptr + choice, mask=row < stop, other=0)
        dweight = tl.zeros((BLOCK_M,), tl.float32)
        left, right = _halves(dact)
        parts = _halves(left) + _halves(right)
        for i in tl.static_range(4):  # a quarter of the columns at a time, lest the operands of the activation spill
            column = column_tile * BLOCK_N + i * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
            dweight += _activation_backward(parts[i], weight, row, stop, column, h_ptr, dh_ptr, act_ptr, f, ACTIVATION)
        tl.store(dweights_ptr + column_tile.to(tl.int64) * n_choices + choice, dweight, mask=row < stop)


@triton.jit
def _halves(x):
    """Left and right columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _activation_backward(dact, weight, row, stop, column, h_ptr, dh_ptr, act_ptr, f, ACTIVATION: tl.constexpr):
    """From the gradient of the unweighted activation; stores these columns and returns each row's sum of activation times gradient."""
    WIDTH: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    inside = (row < stop)[:, None] & (column < f)[None, :]
    place = row.to(tl.int64)[:, None] * f * WIDTH + column[None, :]
    h = tl.load(h_ptr + place, mask=inside, other=0).to(tl.float32)
    weighted = dact * weight[:, None]
    if ACTIVATION == "swiglu":
        up = tl.load(h_ptr + place + f, mask=inside, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(h)
        act = _swiglu(h, up)
        dh = weighted * up * sigmoid * (1 + h * (1 - sigmoid))
        tl.store(dh_ptr + place + f, (weighted * h * sigmoid).to(dh_ptr.dtype.element_ty), mask=inside)
    else:
        act = _relu2(h)
        dh = weighted * tl.where(h < 0, 0.0, 2 * h)
    tl.store(dh_ptr + place, dh.to(dh_ptr.dtype.element_ty), mask=inside)
    act_ptrs = act_ptr + row.to(tl.int64)[:, None] * f + column[None, :]
    tl.store(act_ptrs, (act * weight[:, None]).to(act_ptr.dtype.element_ty), mask=inside)
    return tl.sum(tl.where(inside, act * dact, 0.0), 1)


@triton.jit
def _combine_kernel(rows_ptr, slots_ptr, weights_ptr, out_ptr, d, CHOICES: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(CHOICES):
        slot = tl.load(slots_ptr + token * CHOICES + k).to(tl.int64)
        values = tl.load(rows_ptr + slot * d + column, mask=(column < d) & (slot >= 0), other=0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + token * CHOICES + k, mask=slot >= 0, other=0)
        total += values
    tl.store(out_ptr + token * d + column, total.to(out_ptr.dtype.element_ty), mask=column < d)


@torch.library.custom_op("reedling::combine_rows", mutates_args=())
def combine(rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Sum of each token's rows, in the order of its choices, times `weights_TK` if given; choices without a row add nothing. [T, D]"""
    tokens, d = slots_TK.shape[0], rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, d)
    block = min(triton.next_power_of_2(d), 1024)
    _combine_kernel[(tokens, triton.cdiv(d, block))](rows_RD, slots_TK, weights_TK, out_TD, d, CHOICES=slots_TK.shape[1], BLOCK=block,
                                                     WEIGHTED=weights_TK is not None, num_warps=4)
    return out_TD


@combine.register_fake
def _(rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    return rows_RD.new_empty(slots_TK.shape[0], rows_RD.shape[1])


@torch.library.custom_op("reedling::experts_triton", mutates_args=())
def _experts_op(x_TD: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, offsets_E1: Tensor, choice_R: Tensor, token_R: Tensor,
                slots_TK: Tensor, activation: str, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """The result, and the pre-activation of each row [R, F or 2F] or none [0, ...]; backward takes the rest of the routing."""
    d, f = down_EDF.shape[1:]
    rows, width = token_R.shape[0], expansion(activation)
    h_RF, act_RF = x_TD.new_empty(rows if keep_hidden else 0, width * f), x_TD.new_empty(rows, f)
    tile, tiles, grid = plan("_up_kernel", x_TD, offsets_E1, rows, width * f, d)
    _up_kernel[grid](x_TD, token_R, up_EFD.to(x_TD.dtype), h_RF, act_RF, *tiles, f, d, **tile, ACTIVATION=activation,
                     KEEP=keep_hidden)
    y_RD = multiply_rows(act_RF, down_EDF.to(x_TD.dtype).transpose(1, 2), offsets_E1)
    return combine(y_RD, slots_TK, weights_TK), h_RF


@_experts_op.register_fake
def _(x_TD: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, offsets_E1: Tensor, choice_R: Tensor, token_R: Tensor,
      slots_TK: Tensor, activation: str, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), x_TD.new_empty(token_R.shape[0] if keep_hidden else 0, up_EFD.shape[1])


@torch.library.custom_op("reedling::experts_hidden_backward", mutates_args=())
def _hidden_backward_op(dy_TD: Tensor, h_RF: Tensor, weights_TK: Tensor, down_EDF: Tensor, offsets_E1: Tensor, choice_R: Tensor,
                        token_R: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation [R, F or 2F], the weighted activation [R, F], and the gradient of the router's weights [T, K]."""
    d, f = down_EDF.shape[1:]
    rows = token_R.shape[0]
    dh_RF, act_RF = torch.empty_like(h_RF), h_RF.new_empty(rows, f)
    tile, tiles, grid = plan("_hidden_backward_kernel", h_RF, offsets_E1, rows, f, d)
    # A part for each tile of columns; choices without an expert keep the zeros.
    dweights = torch.zeros(triton.cdiv(f, tile["BLOCK_N"]), *weights_TK.shape, device=h_RF.device)
    _hidden_backward_kernel[grid](dy_TD, token_R, choice_R, weights_TK, down_EDF, h_RF, dh_RF, act_RF, dweights, *tiles, f, d, rows, **tile,
                                  ACTIVATION=activation)
    return dh_RF, act_RF, dweights.sum(0)


@_hidden_backward_op.register_fake
def _(dy_TD: Tensor, h_RF: Tensor, weights_TK: Tensor, down_EDF: Tensor, offsets_E1: Tensor, choice_R: Tensor, token_R: Tensor,
      activation: str) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h_RF), h_RF.new_empty(token_R.shape[0], down_EDF.shape[2]), torch.empty_like(weights_TK)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.keep_hidden = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy_TD: Tensor, dh_RF: None) -> tuple[Tensor | None, ...]:
    x_TD, weights_TK, up_EFD, down_EDF, offsets_E1, choice_R, token_R, slots_TK, h_RF = ctx.saved_tensors
    dy_TD = dy_TD.contiguous()
    if not ctx.keep_hidden:
        h_RF = multiply_rows(x_TD, up_EFD.to(dy_TD.dtype).transpose(1, 2), offsets_E1, token_R)
    dh_RF, act_RF, dweights_TK = _hidden_backward_op(dy_TD, h_RF, weights_TK, down_EDF.to(dy_TD.dtype), offsets_E1, choice_R, token_R,
                                                     ctx.activation)
    needs_x, _, needs_up, needs_down = ctx.needs_input_grad[:4]
    dx_TD = combine(multiply_rows(dh_RF, up_EFD.to(dy_TD.dtype), offsets_E1), slots_TK) if needs_x else None
    dup_EFD = multiply_groups(dh_RF, x_TD, offsets_E1, up_EFD.dtype, b_gather_R=token_R) if needs_up else None
    ddown_EDF = multiply_groups(dy_TD, act_RF, offsets_E1, down_EDF.dtype, a_gather_R=token_R) if needs_down else None
    return dx_TD, dweights_TK, dup_EFD, ddown_EDF, None, None, None, None, None, None


_experts_op.register_autograd(_backward, setup_context=_save)


def experts_triton(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor, activation: str,
                   keep_hidden: bool = True) -> Tensor:
    """x in fp32, bf16 or fp16, in which the products run. Weights of experts may be fp32 beside 16-bit tokens: their gradients are then
    written in fp32, straight from the accumulator.
    """
    return _experts_op(x_TD.contiguous(), weights_TK.float().contiguous(), up_EFD.contiguous(), down_EDF.contiguous(),
                       *route(ids_TK, up_EFD.shape[0]), activation, keep_hidden)[0]
