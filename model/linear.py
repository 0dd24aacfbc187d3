"""Projections of layers: a dense product, with a low-rank update where the matrix has one."""

import math

import torch
from torch import Tensor

from kernels import linear as kernel
from kernels.activation import widen
from model import lora
from model.draws import of_slots
from model.params import P, Tree
from parallel.collectives import all_reduce


def linear(x: Tensor, weight: "Tensor | lora.Adapted", bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias for x [..., I].

    An adapted matrix adds scale (drop(x) aᵀ) bᵀ; DoRA then gives each row of the product the length that it learns, a length whose own
    dependence on a and b gets no gradient.
    """
    if isinstance(weight, Tensor):
        return kernel.linear(x, weight, bias)
    low = kernel.linear(kernel.linear(_dropped(x, weight), weight.a), weight.b)
    y = kernel.linear(x, weight.weight) + weight.scale * low
    if weight.magnitude is not None:
        y = y * _lengthening(weight, weight.magnitude).to(y.dtype)
    return y if bias is None else y + bias


def affine_spec(shape: tuple[int, ...], axes: tuple[str, ...], bias: bool = True) -> Tree:
    """Weight and bias of a linear or convolution layer; the weight has the variance of PyTorch's default initialisation."""
    std = 1 / math.sqrt(3 * math.prod(shape[1:]))
    return {"weight": P(shape, axes, std=std)} | ({"bias": P(shape[:1], axes[:1], "zeros")} if bias else {})


def affine(w: Tree, x: Tensor) -> Tensor:
    """`linear` by the weight and, if it has one, the bias of a layer; of a convolution with a single tap too."""
    return linear(x, w["weight"].flatten(1), w.get("bias"))


def _lengthening(w: "lora.Adapted", magnitude: Tensor) -> Tensor:
    """Wanted over actual length of each row. [O]"""
    with torch.no_grad():
        actual = lora.row_lengths(widen(w.weight) + w.scale * (widen(w.b) @ widen(w.a)))
        lengths_2O = torch.stack((lora.row_lengths(w.weight), actual))
        if w.first is not None:
            assert w.ctx is not None
            assert w.ctx.tp_group is not None
            lengths_2O = all_reduce(lengths_2O.square(), w.ctx.tp_group).sqrt()
    return (1 + widen(magnitude)) * (lengths_2O[0] / lengths_2O[1])


def _dropped(x: Tensor, w: "lora.Adapted") -> Tensor:
    if not w.dropout:
        return x
    assert w.salt is not None
    assert w.ctx is not None
    keep = of_slots(w.salt, w.ctx, x.shape[0], x.shape[1], w.first or 0) >= w.dropout
    return torch.where(keep, x / (1 - w.dropout), 0)
