"""Which part of heads, groups and columns a tensor-parallel rank has; loss and norm over ranks against whole ones, and what the loss
multiplies."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.norm import gated_rms_norm
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


@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
def test_a_frozen_head_multiplies_nothing_for_its_gradient(frozen: bool, products: int) -> None:
    start_processes(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    tokens, width, rows = 10, 6, 14
    h_TD, table_VD = torch.randn(tokens, width, requires_grad=True), torch.randn(rows, width, requires_grad=not frozen)
    with FlopCounterMode(display=False) as counter:
        tensor.cross_entropy(h_TD, table_VD, rows, rows - 1, torch.arange(tokens), group).backward()
    assert counter.get_total_flops() == products * 2 * tokens * width * rows  # logits, and a gradient each
    assert h_TD.grad is not None
    assert (table_VD.grad is None) == frozen


def on_ranks(monkeypatch: pytest.MonkeyPatch, collective: str, ranks: int, function: Callable[[Any], Tensor]) -> list[Tensor]:
    """What function(group) is on every rank, in one process; nothing that it gathers depends on what it has gathered before."""
    groups = [SimpleNamespace(size=lambda: ranks, rank=lambda r=r: r) for r in range(ranks)]
    given: list[Tensor] = []

    def first(x: Tensor, group: Any) -> Tensor:
        given.append(x)
        return torch.cat([x] * ranks)

    monkeypatch.setattr(tensor, collective, first)
    for group in groups:
        function(group)
    calls = len(given) // ranks
    gathered = itertools.cycle([torch.cat(given[call::calls]) for call in range(calls)])
    monkeypatch.setattr(tensor, collective, lambda x, group: next(gathered))
    return [function(group) for group in groups]


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 6), (2, 10), (4, 16)])
def test_loss_over_a_padded_vocabulary_is_that_of_its_real_rows(monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int, chunk: int) -> None:
    """Of 6 words: no padding; padding on the second rank; one rank with both and two with padding alone. 9 labels, in 3 chunks or one."""
    monkeypatch.setattr(tensor, "CHUNK", chunk)
    h, table = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, -100, 3, 4, 2, 1, -100, 5])
    expected = F.cross_entropy(h @ table[:6].t(), labels, ignore_index=-100, reduction="sum")
    losses = on_ranks(monkeypatch, "all_gather_start", ranks, lambda group: tensor.cross_entropy(h, table, rows, 6, labels, group))
    for loss in losses:
        torch.testing.assert_close(loss, expected / ranks, rtol=1e-13, atol=0)
    for a, b in zip(*(torch.autograd.grad(3 * loss, (h, table)) for loss in (torch.stack(losses).sum(), expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_norm_of_groups_that_several_ranks_share(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    x, gate, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 24), (7, 24), (24,)))
    xs, gates, weights = (t.chunk(4, -1) for t in (x, gate, weight))

    def norm(group: Any) -> Tensor:
        rank = group.rank()
        return tensor.gated_rms_norm(xs[rank], gates[rank], weights[rank], 1e-5, groups, group)

    got, expected = torch.cat(on_ranks(monkeypatch, "all_gather_grad", 4, norm), -1), gated_rms_norm(x, gate, weight, 1e-5, groups)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    probe = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((y * probe).sum(), (x, gate, weight)) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
