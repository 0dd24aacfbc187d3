"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results travel back.

allgather: every rank sees the tokens of its group and computes the part that its own experts contribute; the parts are summed on the way
back. All shapes are static, nothing syncs with the host, both directions are one collective. A token travels to ep - 1 ranks.
alltoall: a token travels once to each rank that has one of its experts, at most top_k of them. How many tokens each pair of ranks exchanges
is read on the host, once a layer and pass, because the sizes of the exchange depend on it.
deepep: the same by another library (parallel/deepep.py).

What needs no other rank runs beside the way out, and in backward beside the way back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel import deepep
from parallel.collectives import (
    all_gather_start,
    all_to_all,
    all_to_all_grad,
    all_to_all_start,
    exchange_start_grad,
    exchange_wait_grad,
    reduce_scatter_grad,
    wait,
)

# (tokens [R, D], expert numbers from this rank's first one [R, K], weights [R, K]) -> what this rank's experts contribute [R, D]
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
Result = TypeVar("Result")


def routed(experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_experts: int, group: ProcessGroup,
           dispatch: str, beside: Callable[[], Result]) -> tuple[Tensor, Result]:
    """Each token's sum over its experts, wherever in the group they are [T, D], and what `beside` gives.

    :param ids_TK: expert numbers; n_experts and more stand for none
    :param dispatch: allgather | alltoall | deepep
    :param beside: called while tokens are on their way
    """
    function = {"allgather": _by_all_gather, "alltoall": _by_all_to_all, "deepep": _by_deepep}[dispatch]
    return function(experts, x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), n_experts // group.size(), group, beside)


def _by_all_gather(experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_local: int, group: ProcessGroup,
                   beside: Callable[[], Result]) -> tuple[Tensor, Result]:
    begun, ids = [exchange_start_grad(t, group) for t in (x_TD, weights_TK)], all_gather_start(ids_TK, group)
    own = beside()
    x_RD, weights_RK = (exchange_wait_grad(t, group) for t in begun)
    y_RD = experts(x_RD, wait(ids) - group.rank() * n_local, weights_RK)
    return reduce_scatter_grad(y_RD.contiguous(), group), own


class Plan(NamedTuple):
    """What travels: rows sorted by destination rank, then by token."""

    token_R: Tensor  # the token of each row to send
    slots_TW: Tensor  # the row of each token for each rank; R where it has no expert there
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


def plan(ids_TK: Tensor, n_local: int, group: ProcessGroup) -> Plan:
    """Which tokens go to which ranks of the group; waits for the device."""
    ranks = torch.arange(group.size(), device=ids_TK.device)
    goes_WT = (ids_TK // n_local == ranks[:, None, None]).any(-1)
    counts_W = goes_WT.sum(1)
    sent, received = torch.stack((counts_W, all_to_all(counts_W, [1] * len(ranks), [1] * len(ranks), group))).tolist()
    rows = sum(sent)
    order = torch.argsort(~goes_WT.flatten(), stable=True)[:rows]
    slots_TW = torch.where(goes_WT.flatten(), goes_WT.flatten().cumsum(0) - 1, rows).view_as(goes_WT).t()
    return Plan(order % len(ids_TK), slots_TW.contiguous(), sent, received)


def _by_all_to_all(experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_local: int, group: ProcessGroup,
                   beside: Callable[[], Result]) -> tuple[Tensor, Result]:
    p = plan(ids_TK, n_local, group)
    begun = [exchange_start_grad(spread(t, p.token_R, p.slots_TW), group, p.received, p.sent) for t in (x_TD, weights_TK)]
    ids = all_to_all_start(ids_TK[p.token_R], p.received, p.sent, group)
    own = beside()
    x_RD, weights_RK = (exchange_wait_grad(t, group, p.received, p.sent) for t in begun)
    y_RD = experts(x_RD, wait(ids) - group.rank() * n_local, weights_RK)
    return combine(all_to_all_grad(y_RD.contiguous(), group, p.sent, p.received), p.token_R, p.slots_TW), own


def _by_deepep(experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_local: int, group: ProcessGroup,
               beside: Callable[[], Result]) -> tuple[Tensor, Result]:
    begun = deepep.dispatch_start(x_TD, ids_TK, weights_TK, n_local * group.size(), group)
    own = beside()
    x_RD, ids_RK, weights_RK, key = deepep.dispatch_wait(begun, group)
    y_RD = experts(x_RD, ids_RK, weights_RK)
    return deepep.combine(y_RD.contiguous(), key, len(x_TD), group), own


def spread(x_TD: Tensor, token_R: Tensor, slots_TW: Tensor) -> Tensor:
    """The rows of tokens that travel. Gradients are added up in the order of ranks, where compilers would use atomic operations. [R, D]"""
    return _Spread.apply(x_TD, token_R, slots_TW)


def combine(back_RD: Tensor, token_R: Tensor, slots_TW: Tensor) -> Tensor:
    """For each token the sum of its rows, in the order of ranks; the inverse way of `spread`. [T, D]"""
    return _Combine.apply(back_RD, token_R, slots_TW)


def _sum_rows(back_RD: Tensor, slots_TW: Tensor) -> Tensor:
    return F.embedding_bag(slots_TW, F.pad(back_RD, (0, 0, 0, 1)), mode="sum")  # a slot of R is no row


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, slots_TW: Tensor) -> Tensor:
        ctx.save_for_backward(slots_TW)
        return x_TD[token_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _sum_rows(grad_RD, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back_RD: Tensor, token_R: Tensor, slots_TW: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum_rows(back_RD, slots_TW)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        return grad_TD[ctx.saved_tensors[0]], None, None
