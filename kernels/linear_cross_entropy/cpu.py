"""A block of rows at a time, and on a CPU the labelled rows alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.activation import widen
from kernels.linear import product
from kernels.linear_cross_entropy.autograd import complete

CHUNK = 256  # rows: with D = 512 their logits and the gradients of these take as much memory as the weight's gradient
CACHED = 64  # rows of a block between logits and their gradients at a time: what one of these steps writes the next finds in a cache
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
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    loss = h_TD.new_zeros((), dtype=wide)
    dh_TD = torch.zeros_like(h_TD) if h_grad else h_TD.new_zeros(0)
    dweight_VD = torch.zeros_like(weight_VD, dtype=wide) if weight_grad else weight_VD.new_zeros(0, dtype=wide)
    for rows_R, count in _blocks(_rows(labels_T, ignore_index), chunk):
        h_RD, labels_R = h_TD[rows_R], labels_T[rows_R]
        labelled_R = labels_R != ignore_index
        labelled_R[count:] = False
        dlogits_RV = product("nt", h_RD, weight_VD)
        parts = (t.split(CACHED) for t in (dlogits_RV, torch.where(labelled_R, labels_R, 0), labelled_R))
        for logits, labels, labelled in zip(*parts, strict=True):
            losses, dlogits = _block(logits, labels, label_smoothing, z_loss, soft_cap, h_grad or weight_grad)
            loss += torch.where(labelled, losses, 0).sum()
            if h_grad or weight_grad:
                logits.copy_(dlogits.masked_fill_(~labelled[:, None], 0))
        if h_grad:
            dh_TD[rows_R[:count]] = product("nn", dlogits_RV, weight_VD)[:count]
        if weight_grad:
            product("tn", dlogits_RV, h_RD, out=dweight_VD, add=True)
    return loss, (labels_T != ignore_index).sum(), dh_TD, dweight_VD.to(weight_VD.dtype)


def _rows(labels_T: Tensor, ignore_index: int) -> Tensor:
    """The rows to look at: on a CPU the labelled ones alone (not audio, prompts, padding); counting them would wait for other devices."""
    if labels_T.device.type == "cpu":
        return (labels_T != ignore_index).nonzero()[:, 0]
    return torch.arange(len(labels_T), device=labels_T.device)


def _blocks(rows: Tensor, chunk: int) -> Iterator[tuple[Tensor, int]]:
    """Row numbers of each block, filled up with repetitions to a multiple of ROWS, and how many of them count."""
    for block in rows.split(chunk):
        if len(block):
            yield torch.cat((block, block[:1].expand(-len(block) % ROWS))), len(block)


def _block(logits_RV: Tensor, labels_R: Tensor, label_smoothing: float, z_loss: float, soft_cap: float | None,
           grad: bool) -> tuple[Tensor, Tensor]:
    """Loss of each row and, with `grad`, the gradient of its raw logits (else something to be ignored)."""
    logits_RV = widen(logits_RV)
    if soft_cap is not None:
        logits_RV = torch.tanh(logits_RV / soft_cap).mul_(soft_cap)
    logp_RV = torch.log_softmax(logits_RV, 1)
    chosen_R1 = labels_R[:, None]
    chosen_logp_R = logp_RV.gather(1, chosen_R1)[:, 0]
    lse_R = logits_RV.gather(1, chosen_R1)[:, 0] - chosen_logp_R
    loss_R = z_loss * lse_R.square() - (1 - label_smoothing) * chosen_logp_R
    if label_smoothing:
        loss_R -= label_smoothing * logp_RV.mean(1)
    if not grad:
        return loss_R, logp_RV
    dlogits_RV = logp_RV.exp_()
    if z_loss:
        dlogits_RV *= (1 + 2 * z_loss * lse_R)[:, None]
    if label_smoothing:
        dlogits_RV -= label_smoothing / dlogits_RV.shape[1]
    dlogits_RV.scatter_add_(1, chosen_R1, dlogits_RV.new_full((1, 1), label_smoothing - 1).expand_as(chosen_R1))
    if soft_cap is not None:
        dlogits_RV *= 1 - (logits_RV / soft_cap).square_()
    return loss_R, dlogits_RV


complete(_loss_op)
