"""Which part of heads, groups and columns a tensor-parallel rank has."""

import pytest
import torch

from parallel import tensor


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
