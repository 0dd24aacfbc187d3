"""Rows by number, with a gradient that is the same in every run: compilers would add up rows with atomic operations, in an
order that threads decide."""

from typing import Any

import torch
from torch import Tensor


def lookup(table_VD: Tensor, numbers_T: Tensor) -> Tensor:
    """table[numbers], and zeros where a number is not one of the table's. [T, D]"""
    return _Lookup.apply(table_VD, numbers_T)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, numbers_T: Tensor) -> Tensor:
        ctx.save_for_backward(numbers_T)
        ctx.rows = len(table_VD)
        inside_T = (numbers_T >= 0) & (numbers_T < ctx.rows)
        return torch.where(inside_T[:, None], table_VD[torch.where(inside_T, numbers_T, 0)], 0)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> Any:
        return _sum_by_number(gradient_TD, ctx.saved_tensors[0], ctx.rows), None


def permute(x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
    """x[order], where `inverse` undoes `order`; the gradient goes the inverse way, where indexing would add up."""
    return _Permute.apply(x, order_T, inverse_T)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        return x[order_T]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.saved_tensors[0]], None, None


@torch.library.custom_op("reedling::sum_by_number", mutates_args=())
def _sum_by_number(rows_TD: Tensor, numbers_T: Tensor, count: int) -> Tensor:
    """Sums, in fp32 or wider, of the rows of each number below `count`, in the rows' dtype. [count, D]"""
    inside_T = (numbers_T >= 0) & (numbers_T < count)
    wide_TD = rows_TD.to(torch.promote_types(rows_TD.dtype, torch.float32))
    # rows that no number has are left out as padding
    sums = torch.ops.aten.embedding_dense_backward(wide_TD, torch.where(inside_T, numbers_T, count), count + 1, count, False)
    return sums[:count].to(rows_TD.dtype).clone()


@_sum_by_number.register_fake
def _(rows_TD: Tensor, numbers_T: Tensor, count: int) -> Tensor:
    return rows_TD.new_empty(count, rows_TD.shape[1])
