"""Pieces of work side by side: each once, on threads that compute alone, and nothing of it left behind."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kernels.experts import experts
from kernels.side_by_side import _pool, side_by_side


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("costs, alone", [([3, 1, 2, 2, 0], True), ([9, 1, 2], False), ([1], False), ([], False)])
def test_every_piece_once(costs: list[int], alone: bool) -> None:
    """With a core for each where the dearest leaves enough to the other thread, else one after the other on both."""
    done: list[tuple[int, int, bool]] = []
    side_by_side(lambda i: done.append((i, torch.get_num_threads(), threading.current_thread() is threading.main_thread())),
                 [(i,) for i in range(len(costs))], costs)
    assert sorted(i for i, _, _ in done) == list(range(len(costs)))
    assert {(threads, main) for _, threads, main in done} <= {(1, False) if alone else (2, True)}
    assert torch.get_num_threads() == 2


def test_both_threads_work_at_once() -> None:
    meet, met = threading.Barrier(2, timeout=20), set[int]()
    side_by_side(lambda i: met.add(meet.wait()), [(0,), (1,)], [1, 1])  # one thread alone would wait for the other
    assert met == {0, 1}


def test_threads_that_start_later_have_all_cores() -> None:
    _pool.cache_clear()  # its threads change the number when they start, which may have been in another test
    side_by_side(lambda i: None, [(0,), (1,)], [1, 1])
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [2]


def test_work_needs_no_gradient_and_its_fault_reaches_the_caller() -> None:
    w = torch.ones(2, requires_grad=True)

    def double(i: int, divisor: int) -> None:
        w[i].mul_(2 // divisor)

    side_by_side(double, [(0, 1), (1, 1)], [1, 1])
    assert w.tolist() == [2, 2]
    with pytest.raises(ZeroDivisionError):
        side_by_side(double, [(0, 1), (1, 0)], [1, 1])


def test_experts_give_the_same_on_one_thread() -> None:
    """Bit by bit: a product that runs on one core does not depend on which."""
    g = torch.Generator().manual_seed(0)
    ids, weights = torch.randint(0, 8, (200, 2), generator=g), torch.rand(200, 2, generator=g)
    leaves = [torch.randn(shape, generator=g).requires_grad_() for shape in ((200, 32), (8, 24, 32), (8, 32, 24))]

    def once() -> list[torch.Tensor]:
        y = experts(leaves[0], ids, weights, *leaves[1:], activation="relu2", implementation="cpu")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    both = once()
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(both, once(), strict=True))
