"""A block of labelled rows (not audio, prompts, padding) at a time, on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels import native
from kernels.linear import product
from kernels.linear_cross_entropy.autograd import complete

CHUNK = 256  # rows: with D = 512 their logits and the gradients of these take as much memory as the weight's gradient
SOURCE = Path(__file__).with_suffix(".cpp")
ROWS = 32  # the rows of a block are padded to a multiple: oneDNN builds a kernel for each new shape


def linear_cross_entropy_chunked(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int | None, ignore_index: int,
                                 label_smoothing: float, z_loss: float, soft_cap: float | None) -> tuple[Tensor, Tensor]:
    """Logits of `chunk` rows at a time, 256 unless given."""
    h_grad, weight_grad = (torch.is_grad_enabled() and t.requires_grad for t in (h_TD, weight_VD))
    return _loss_op(h_TD.contiguous(), weight_VD.contiguous(), labels_T, CHUNK if chunk is None else chunk, ignore_index, label_smoothing,
                    z_loss, soft_cap, h_grad, weight_grad)[:2]


@torch.library.custom_op("reedling::linear_cross_entropy", mutates_args=())
def _loss_op(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, ignore_index: int, label_smoothing: float, z_loss: float,
             soft_cap: float | None, h_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, count and the gradients of h and weight, each empty unless asked for."""
    cross_entropy_ = native.operators(SOURCE).cross_entropy_
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    loss = h_TD.new_zeros((), dtype=wide)
    dh_TD = torch.zeros_like(h_TD) if h_grad else h_TD.new_zeros(0)
    dweight_VD = torch.zeros_like(weight_VD, dtype=wide) if weight_grad else weight_VD.new_zeros(0, dtype=wide)
    for rows_R, count in _blocks((labels_T != ignore_index).nonzero()[:, 0], chunk):
        h_RD, labels_R = h_TD[rows_R], labels_T[rows_R]
        labels_R[count:] = ignore_index
        dlogits_RV = product("nt", h_RD, weight_VD)  # the operator turns logits into their gradients
        loss += cross_entropy_(dlogits_RV, labels_R, ignore_index, label_smoothing, z_loss, soft_cap, h_grad or weight_grad)
        if h_grad:
            dh_TD[rows_R[:count]] = product("nn", dlogits_RV, weight_VD)[:count]
        if weight_grad:
            product("tn", dlogits_RV, h_RD, out=dweight_VD, add=True)
    return loss, (labels_T != ignore_index).sum(), dh_TD, dweight_VD.to(weight_VD.dtype)


def _blocks(rows: Tensor, chunk: int) -> Iterator[tuple[Tensor, int]]:
    """Row numbers of each block, filled up with repetitions to a multiple of ROWS, and how many of them count."""
    for block in rows.split(chunk):
        if len(block):
            yield torch.cat((block, block[:1].expand(-len(block) % ROWS))), len(block)


complete(_loss_op)
