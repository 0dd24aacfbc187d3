"""Dense products, on a CPU by whichever of MKL and oneDNN multiplies fp32 faster on this machine.

PyTorch sends fp32 products to MKL. Some processors run oneDNN twice as fast, others the same, and which wins can differ between
x wᵀ, dy w and dyᵀ x, so each of the three is timed once a process, at its first use. The result of a product differs between the two
libraries by rounding alone; where a run must repeat another bit by bit, it takes over the choice (use_libraries).
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ENVIRONMENT = "REEDLING_FP32_PRODUCTS"  # mkl | onednn: choose without measuring
MARGIN = 1.05  # oneDNN has to win by this, lest noise decide between equals
ROUNDS = 12


def linear(x: Tensor, w_OI: Tensor, bias: Tensor | None = None, implementation: str = "auto") -> Tensor:
    """x wᵀ + bias.

    :param x: [..., I]
    :param bias: [O]
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    if implementation == "auto":
        implementation = "measured" if x.device.type == "cpu" and x.dtype == torch.float32 else "torch"
    return IMPLEMENTATIONS[implementation](x, w_OI, bias)


def linear_reference(x: Tensor, w_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + bias as its definition says."""
    y = torch.einsum("...i,oi->...o", x, w_OI)
    return y if bias is None else y + bias


def _linear_measured(x: Tensor, w_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    y = product_nt(x.reshape(-1, x.shape[-1]), w_OI).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "reference": linear_reference, "torch": F.linear, "measured": _linear_measured}


def _mkl(a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    if out is None or not add:
        return torch.mm(a, b, out=out)
    return out.addmm_(a, b) if out.dtype == a.dtype else out.add_(a @ b)


def _onednn(a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    y = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return y if out is None else out.add_(y) if add else out.copy_(y)


LIBRARIES: dict[str, Callable[..., Tensor]] = {"mkl": _mkl, "onednn": _onednn}
# The three products of a dense layer as operands of a b: its output, the gradient of its input, the gradient of its weight.
OPERANDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nt": lambda x, w: (x, w.t()), "nn": lambda dy, w: (dy, w), "tn": lambda dy, x: (dy.t(), x)}


def product(kind: str, a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """One of the products of OPERANDS, eagerly, written to `out` or, with `add`, added to what is there, which may be wider.

    16-bit and fp64 products, and those on other devices, go where PyTorch sends them.
    """
    fast = a.device.type == "cpu" and a.dtype == torch.float32 and a.numel() > 0 and b.numel() > 0
    return LIBRARIES[library(kind) if fast else "mkl"](*OPERANDS[kind](a, b), out, add)


_chosen: dict[str, str] = {}


def library(kind: str) -> str:
    """The library that multiplies fp32 here: by REEDLING_FP32_PRODUCTS, by use_libraries, or the faster one, measured at the first call."""
    return os.environ.get(ENVIRONMENT) or _chosen.get(kind) or _measured_library(kind)


def libraries() -> dict[str, str]:
    """The library of each of the three products in this process."""
    return {kind: library(kind) for kind in OPERANDS}


def use_libraries(choice: Mapping[str, str]) -> None:
    """Multiply from now on as another process did, say that which wrote a checkpoint; REEDLING_FP32_PRODUCTS still comes first."""
    _chosen.update(choice)


@functools.cache
def _measured_library(kind: str) -> str:
    if not torch.backends.mkldnn.is_available():
        return "mkl"
    rows, width = 256, 512
    shapes = {"nt": ((rows, width), (width, width)), "nn": ((rows, width), (width, width)), "tn": ((rows, width), (rows, width))}
    a, b = OPERANDS[kind](*(torch.ones(shape) for shape in shapes[kind]))
    best = dict.fromkeys(LIBRARIES, float("inf"))
    for _ in range(ROUNDS):  # in turn, so that a busy moment disturbs both
        for name, function in LIBRARIES.items():
            start = time.perf_counter()
            function(a, b, None)
            best[name] = min(best[name], time.perf_counter() - start)
    return "onednn" if best["onednn"] * MARGIN < best["mkl"] else "mkl"


@torch.library.custom_op("reedling::product_nt", mutates_args=())
def product_nt(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """x wᵀ [T, O]."""
    return product("nt", x_TI, w_OI)


@torch.library.custom_op("reedling::product_nn", mutates_args=())
def product_nn(dy_TO: Tensor, w_OI: Tensor) -> Tensor:
    """dy w [T, I]."""
    return product("nn", dy_TO, w_OI)


@torch.library.custom_op("reedling::product_tn", mutates_args=())
def product_tn(dy_TO: Tensor, x_TI: Tensor) -> Tensor:
    """dyᵀ x [O, I]."""
    return product("tn", dy_TO, x_TI)


@product_nt.register_fake
def _(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], w_OI.shape[0])


@product_nn.register_fake
def _(dy_TO: Tensor, w_OI: Tensor) -> Tensor:
    return dy_TO.new_empty(dy_TO.shape[0], w_OI.shape[1])


@product_tn.register_fake
def _(dy_TO: Tensor, x_TI: Tensor) -> Tensor:
    return dy_TO.new_empty(dy_TO.shape[1], x_TI.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, w = ctx.saved_tensors
    return product_nn(dy, w) if ctx.needs_input_grad[0] else None, product_tn(dy, x) if ctx.needs_input_grad[1] else None


product_nt.register_autograd(_backward, setup_context=_save)
