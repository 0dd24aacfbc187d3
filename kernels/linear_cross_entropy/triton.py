"""A chunk of rows at a time on a GPU: cuBLAS multiplies, one kernel turns a chunk's logits into its losses and gradients in place.

The three products are all of the floor (21.9 ms of 8,192 rows at 2,688 x 131,072 on an H100, against 2.5 ms for reading and writing the
logits in bf16) and cuBLAS runs them at the rate by which that floor is measured; a product of our own that kept the logits on the chip
would save at most a tenth and lose more than that to its lower rate, and one that stores no logits at all needs a fourth product.

Rows of a chunk. With R rows a chunk, T rows in all and 16-bit weights, memory sees 12 V bytes a row for the logits (stored, read for the
maximum, read for the gradient, stored, read by two products) and 12 V D bytes a chunk for the weight (read twice, 2 bytes) and its
gradient (read and written in fp32): 12 T V (1 + D / R) bytes. At R = D the two are equal: fewer rows, and the weight's traffic grows as
1 / R; more, and what is left to gain is small while the logits take more memory than the weight itself. A product stays bound by
arithmetic, its traffic hidden, while R / 4 FLOP a byte exceed the 184 at which an H100 turns from one to the other: never below 1,024.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch
from kernels.linear_cross_entropy.autograd import complete

FEWEST_ROWS, ROW_MULTIPLE = 1024, 256


def linear_cross_entropy_triton(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None, ignore_index: int,
                                label_smoothing: float, z_loss: float, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """All rows, labelled or not: how many are labelled only the device knows."""
    h_grad, weight_grad = (torch.is_grad_enabled() and t.requires_grad for t in (h_TD, weight_VD))
    rows = chunk_rows(h_TD.shape[1]) if chunk is None else chunk
    return _loss_op(h_TD.contiguous(), weight_VD.contiguous(), labels_T.contiguous(), rows, ignore_index, label_smoothing, z_loss, soft_cap,
                    h_grad, weight_grad)[:2]


def chunk_rows(width: int) -> int:
    """Rows of a chunk for a model of this width; see above."""
    return max(FEWEST_ROWS, -(-width // ROW_MULTIPLE) * ROW_MULTIPLE)


@torch.library.custom_op("reedling::linear_cross_entropy_triton", mutates_args=())
def _loss_op(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, ignore_index: int, label_smoothing: float, z_loss: float,
             soft_cap: float | None, h_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, count and the gradients of h and weight, each empty unless asked for."""
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    losses_T = h_TD.new_empty(len(h_TD), dtype=wide)
    dh_TD = torch.empty_like(h_TD) if h_grad else h_TD.new_empty(0)
    dweight_VD = torch.zeros_like(weight_VD, dtype=wide) if weight_grad else weight_VD.new_empty(0, dtype=wide)
    for start in range(0, len(h_TD), chunk):
        rows = slice(start, start + chunk)
        logits_RV = torch.mm(h_TD[rows], weight_VD.t())
        _losses(logits_RV, labels_T[rows], losses_T[rows], ignore_index, label_smoothing, z_loss, soft_cap, h_grad or weight_grad)
        if h_grad:
            torch.mm(logits_RV, weight_VD, out=dh_TD[rows])
        if weight_grad:
            _add_product(dweight_VD, logits_RV.t(), h_TD[rows])
    return losses_T.sum(), (labels_T != ignore_index).sum(), dh_TD, dweight_VD.to(weight_VD.dtype)


complete(_loss_op)


def _losses(logits_RV: Tensor, labels_R: Tensor, losses_R: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
            soft_cap: float | None, gradient: bool) -> None:
    """Writes the losses, and with `gradient` replaces the logits by the gradients of their loss."""
    rows, vocabulary = logits_RV.shape
    options: dict[str, Any] = launch.tiles("linear_cross_entropy", "_row_kernel", logits_RV.device)
    _row_kernel[(rows,)](logits_RV, labels_R, losses_R, vocabulary, ignore_index, SMOOTHING=label_smoothing, Z_LOSS=z_loss,
                         SOFT_CAP=soft_cap or 0.0, GRADIENT=gradient, **options)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, added up and stored in the dtype of total, in one pass over it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@triton.jit
def _capped(x, SOFT_CAP: tl.constexpr):
    """SOFT_CAP tanh(x / SOFT_CAP); x itself for 0."""
    if SOFT_CAP == 0:
        return x
    decay = tl.exp(-2 * tl.abs(x) / SOFT_CAP)
    tanh = (1 - decay) / (1 + decay)
    return SOFT_CAP * tl.where(x < 0, -tanh, tanh)


@triton.jit
def _row_kernel(logits_ptr, labels_ptr, losses_ptr, vocabulary, ignore_index, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
                SOFT_CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr):
    """One row: its loss and, with GRADIENT, in place of its logits their gradients. Zeros for a row without a label."""
    row = tl.program_id(0).to(tl.int64)
    WIDE: tl.constexpr = losses_ptr.dtype.element_ty
    logits_ptr += row * vocabulary
    label = tl.load(labels_ptr + row)
    labelled = label != ignore_index
    tl.device_assert((label >= 0) & (label < vocabulary) | (label == ignore_index), "a label is outside the vocabulary")
    chosen = _capped(tl.load(logits_ptr + label, mask=labelled, other=0).to(WIDE), SOFT_CAP)

    v = tl.arange(0, BLOCK_V)
    share = tl.full((), SMOOTHING, WIDE) / vocabulary
    highest = tl.full((), float("-inf"), WIDE)
    total, sum_of_logits = tl.full((), 0, WIDE), tl.full((), 0, WIDE)
    for start in range(0, tl.where(labelled, vocabulary, 0), BLOCK_V):
        exists = start + v < vocabulary
        x = _capped(tl.load(logits_ptr + start + v, mask=exists, other=0).to(WIDE), SOFT_CAP)
        if SMOOTHING > 0:
            sum_of_logits += tl.sum(x, 0)
        x = tl.where(exists, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher

    # The logarithm of `total` stays apart from `highest`: their sum would round away what a confident prediction still has to learn.
    log_total = tl.log(tl.where(labelled, total, 1))
    highest = tl.where(labelled, highest, 0)
    lse = highest + log_total
    loss = log_total + (highest - chosen) + Z_LOSS * lse * lse
    if SMOOTHING > 0:
        loss += SMOOTHING * chosen - share * sum_of_logits
    tl.store(losses_ptr + row, tl.where(labelled, loss, 0))

    if GRADIENT:
        for start in range(0, vocabulary, BLOCK_V):
            exists = start + v < vocabulary
            x = tl.load(logits_ptr + start + v, mask=exists & labelled, other=0).to(WIDE)
            capped = _capped(x, SOFT_CAP)
            p = tl.exp(capped - highest - log_total)
            gradient = p * (1 + 2 * Z_LOSS * lse) - share - (1 - SMOOTHING) * (start + v == label).to(WIDE)
            if SOFT_CAP != 0:
                decay = tl.exp(-2 * tl.abs(x) / SOFT_CAP)
                gradient *= 4 * decay / ((1 + decay) * (1 + decay))  # 1 - tanh², which is 0 too soon if written so
            tl.store(logits_ptr + start + v, tl.where(labelled, gradient, 0).to(logits_ptr.dtype.element_ty), mask=exists)
