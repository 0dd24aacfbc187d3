"""Attention over ranks without gathering: keys and values go round a ring of ranks, and what a rank finds among each part is merged by the
logarithms of the softmax's denominators. Backward they go round again, with the gradients that they have met so far.

While a part is computed with, the next one is on its way. Parts of which a rank's queries see nothing cost it nothing but their passing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.activation import widen
from kernels.attention import attention, attention_backward
from parallel.collectives import hand_on_start, wait


def ring_attention(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, pieces_P1: Tensor, segments_T: Tensor, ranges_R2P: Tensor,
                   group: ProcessGroup) -> Tensor:
    """As kernels.attention of this rank's queries to the keys of all ranks. [T, N, H]

    :param pieces_P1: boundaries of pieces of this rank's queries, and `segments_T` the piece of each
    :param ranges_R2P: which of the keys of each rank a piece sees; of its own a query sees none behind itself, and the last query of a
        piece sits at the last of them
    """
    return _Ring.apply(q_TNH, torch.stack((k_TGH, v_TGH), 1), pieces_P1, segments_T, ranges_R2P, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, own_T2GH: Tensor, pieces_P1: Tensor, segments_T: Tensor, ranges_R2P: Tensor,
                group: ProcessGroup) -> Tensor:
        ranks, rank, part = group.size(), group.rank(), own_T2GH
        out_TNH, lse_NT = widen(torch.zeros_like(q_TNH)), widen(q_TNH.new_full(q_TNH.shape[1::-1], -torch.inf))
        for step in range(ranks):
            arriving = hand_on_start([part], group) if step + 1 < ranks else []
            found_TNH, found_NT = attention(q_TNH, part[:, 0], part[:, 1], pieces_P1, segments_T=segments_T,
                                            keys_2U=ranges_R2P[(rank - step) % ranks], causal=step == 0)
            out_TNH, lse_NT = _merged(out_TNH, lse_NT, found_TNH, found_NT)
            part = wait(arriving[0]) if arriving else part
        out_TNH = out_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, own_T2GH, pieces_P1, segments_T, ranges_R2P, out_TNH, lse_NT)
        ctx.group = group
        return out_TNH

    @staticmethod
    def backward(ctx: Any, dout_TNH: Tensor) -> Any:
        q_TNH, own_T2GH, pieces_P1, segments_T, ranges_R2P, out_TNH, lse_NT = ctx.saved_tensors
        ranks, rank, part = ctx.group.size(), ctx.group.rank(), own_T2GH
        dq_TNH = widen(torch.zeros_like(q_TNH))
        met: list[Tensor] = []  # gradients of the part before, which follow it a step behind: one message is under way at a time
        for step in range(ranks):
            ahead = [part] if step + 1 < ranks else []
            arriving = hand_on_start([*ahead, *met], ctx.group)
            dq, dk, dv = attention_backward(dout_TNH, q_TNH, part[:, 0], part[:, 1], out_TNH, lse_NT, pieces_P1, segments_T=segments_T,
                                            keys_2U=ranges_R2P[(rank - step) % ranks], causal=step == 0)
            dq_TNH = dq_TNH + dq
            found = widen(torch.stack((dk, dv), 1))
            arrived = [wait(x) for x in arriving]
            part = arrived[0] if ahead else part
            met = [arrived[-1] + found if met else found]
        # the last hand-over brings them to the rank whose keys they belong to
        (own,) = hand_on_start(met, ctx.group)
        return dq_TNH.to(q_TNH.dtype), wait(own).to(own_T2GH.dtype), None, None, None, None


def _merged(out_TNH: Tensor, lse_NT: Tensor, found_TNH: Tensor, found_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as the one over all of them, and its denominator's logarithm."""
    both_NT = torch.logaddexp(lse_NT, found_NT)
    before_TN1, now_TN1 = (torch.where(both_NT == -torch.inf, 0, (t - both_NT).exp()).t()[..., None] for t in (lse_NT, found_NT))
    return before_TN1 * out_TNH + now_TN1 * found_TNH, both_NT
