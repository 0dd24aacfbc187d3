"""Tokens that travel to several ranks and come back are added up in a fixed order, forward and backward: the same bits for any threads."""

import pytest
import torch
from torch import Tensor

from parallel.expert import combine, spread

TOKENS, RANKS, WIDTH = 301, 4, 33


def in_order(rows_RD: Tensor, goes_WT: Tensor, slots_TW: Tensor) -> Tensor:
    total_TD = torch.zeros(TOKENS, WIDTH)
    for w in range(RANKS):
        total_TD = torch.where(goes_WT[w, :, None], total_TD + rows_RD[slots_TW[:, w].clamp(max=len(rows_RD) - 1)], total_TD)
    return total_TD


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_a_token_are_added_in_the_order_of_ranks(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    goes_WT = torch.rand(RANKS, TOKENS, generator=generator) < 0.6
    rows = int(goes_WT.sum())
    slots_TW = torch.where(goes_WT.flatten(), goes_WT.flatten().cumsum(0) - 1, rows).view_as(goes_WT).t().contiguous()
    token_R = torch.arange(TOKENS).expand(RANKS, -1)[goes_WT]
    x_TD, dy_TD = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    back_RD, dx_RD = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    leaves = x_TD.requires_grad_(), back_RD.requires_grad_()

    def both(x_TD: Tensor, back_RD: Tensor) -> tuple[Tensor, Tensor]:
        return spread(x_TD, token_R, slots_TW), combine(back_RD, token_R, slots_TW)

    torch.set_num_threads(2)
    try:
        x_RD, y_TD = (torch.compile(both, fullgraph=True) if compiled else both)(*leaves)
        dx_TD, dback_RD = torch.autograd.grad((x_RD, y_TD), leaves, (dx_RD, dy_TD))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(x_RD, x_TD[token_R])
    assert torch.equal(y_TD, in_order(back_RD.detach(), goes_WT, slots_TW))
    assert torch.equal(dx_TD, in_order(dx_RD, goes_WT, slots_TW))
    assert torch.equal(dback_RD, dy_TD[token_R])
