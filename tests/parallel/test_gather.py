"""Gradients that wait for the last row of a step."""

import torch

from configs.schema import ParallelConfig
from model.params import P
from parallel.gather import Reshard, Shared, Unit
from parallel.mesh import make_mesh, start_processes


def test_waiting_gradients_of_bf16_weights_are_added_up_in_fp32() -> None:
    """1 and three times 2^-9: in bf16 the sum would stay at 1."""
    start_processes(torch.device("cpu"))
    unit = Unit([P((4,), ("embed",), "ones")], make_mesh(ParallelConfig(), torch.device("cpu")), torch.bfloat16, Reshard())
    shared, leaf = Shared(defers=True, last=False), torch.ones(4)
    for value in (1.0, 2.0**-9, 2.0**-9):
        assert shared.reduce(unit, [torch.full((4,), value, dtype=torch.bfloat16)], [leaf]) == [None]
    shared.last = True
    (total,) = shared.reduce(unit, [torch.full((4,), 2.0**-9, dtype=torch.bfloat16)], [leaf])
    assert total is not None
    assert total.tolist() == [1 + 3 * 2.0**-9] * 4
    assert not shared.pending


def test_rows_are_added_up_in_memory_that_no_other_gradient_has() -> None:
    """Autograd hands the same tensor over for two parameters that were added to each other."""
    start_processes(torch.device("cpu"))
    leaves, mesh = [P((4,), ("embed",), "ones")] * 2, make_mesh(ParallelConfig(), torch.device("cpu"))
    unit, grad = Unit(leaves, mesh, torch.float32, Reshard(), fetched=True), torch.ones(4)
    sums, _ = unit.reduce_start([grad, grad], [None, None])
    assert unit.reduce_start([grad, grad], sums)[0] == [None, None]
    assert [None if total is None else total.tolist() for total in sums] == [[2.0] * 4] * 2
