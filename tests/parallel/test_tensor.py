"""Which part of heads, groups and columns a tensor-parallel rank has, and what the loss of a split vocabulary multiplies."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from parallel import tensor
from parallel.mesh import start_processes


@pytest.mark.parametrize(("whole", "ranks", "parts"), [
    ((0, 8), 1, [(0, 8)]),
    ((0, 8), 2, [(0, 4), (4, 4)]),
    ((8, 8), 4, [(8, 2), (10, 2), (12, 2), (14, 2)]),
    ((0, 2), 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),  # fewer than ranks: shared
    ((3, 1), 2, [(3, 1), (3, 1)]),
])
def test_parts(whole: tensor.Part, ranks: int, parts: list[tensor.Part]) -> None:
    assert [tensor.part_of(whole, ranks, rank) for rank in range(ranks)] == parts
    assert tensor.own_part(whole, None) == whole


def test_blocks_are_taken_one_after_the_other() -> None:
    t = torch.arange(24).view(12, 2)
    assert torch.equal(tensor.take(t, [(1, 2), (7, 1)]), t[[1, 2, 7]])
    assert torch.equal(tensor.take(t, [(1, 1)], 1), t[:, 1:])
    assert tensor.take(t, [(0, 6), (6, 6)]) is t


@pytest.mark.parametrize(("frozen", "products"), [(False, 4), (True, 3)])
def test_a_frozen_head_multiplies_nothing_for_its_gradient(frozen: bool, products: int) -> None:
    start_processes(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    tokens, width, rows = 10, 6, 14
    h_TD, table_VD = torch.randn(tokens, width, requires_grad=True), torch.randn(rows, width, requires_grad=not frozen)
    with FlopCounterMode(display=False) as counter:
        tensor.cross_entropy(h_TD, table_VD, rows, rows - 1, torch.arange(tokens), group).backward()
    assert counter.get_total_flops() == products * 2 * tokens * width * rows  # logits, logits again, and a gradient each
    assert h_TD.grad is not None
    assert (table_VD.grad is None) == frozen
