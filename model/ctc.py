"""Auxiliary CTC head on the encoder: a linear layer to the vocabulary and, last, the blank."""

import torch
from torch import Tensor

from kernels.activation import widen
from kernels.ctc_loss import ctc_loss
from kernels.linear import linear
from kernels.ragged import pad
from model.audio_row import layout
from model.context import Context
from model.params import P, Tree


def spec(d_model: int, vocab: int) -> Tree:
    return {"weight": P((vocab + 1, d_model), ("symbols", "embed"), std=(3 * d_model) ** -0.5),
            "bias": P((vocab + 1,), ("symbols",), "zeros")}


def loss(w: Tree, x_AD: Tensor, labels_UL: Tensor, label_lengths_U: Tensor, ctx: Context) -> Tensor:
    """Sum of the losses of this rank's utterances, fp32; those that are unused or too short for their labels add nothing.

    :param labels_UL: token ids; beyond label_lengths_U any
    """
    logits_AV = _logits(w, x_AD)
    labels_AL = labels_UL[ctx.audio_segments_A.clamp(max=labels_UL.shape[0] - 1)]
    scores = torch.cat((logits_AV.gather(1, labels_AL), logits_AV[:, -1:]), 1) - logits_AV.logsumexp(1, keepdim=True)
    padded = pad(scores, layout(ctx))
    return ctc_loss(padded[:, :, :-1], padded[:, :, -1], labels_UL, ctx.audio_lengths_U, label_lengths_U).sum()


def greedy(w: Tree, x_AD: Tensor, ctx: Context) -> list[list[int]]:
    """Token ids of each utterance: the best of every frame, repetitions merged, blanks dropped. Reads lengths on the host."""
    best_A = _logits(w, x_AD).argmax(1)
    blank = w["weight"].shape[0] - 1
    texts = []
    for start, length in zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True):
        ids = torch.unique_consecutive(best_A[start : start + length])
        texts.append(ids[ids != blank].tolist())
    return texts


def _logits(w: Tree, x_AD: Tensor) -> Tensor:
    return widen(linear(x_AD, w["weight"], w["bias"]))
