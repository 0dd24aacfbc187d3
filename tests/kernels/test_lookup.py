"""Rows by number against indexing in fp64, and against itself in other threads."""

import pytest
import torch

from kernels.lookup import _sum_by_number, lookup

NUMBERS = [3, 0, -1, 3, 7, 3, 5, 8, 100]  # of a table of 8 rows: -1, 8 and 100 are none of them


def sums(gradient: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([gradient[numbers == row].sum(0) for row in range(count)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_and_gradients_are_those_of_indexing(dtype):
    table, numbers, probe = torch.randn(8, 5, dtype=dtype, requires_grad=True), torch.tensor(NUMBERS), torch.randn(9, 5, dtype=dtype)
    rows = lookup(table, numbers)
    inside = (numbers >= 0) & (numbers < 8)
    assert torch.equal(rows[inside], table[numbers[inside]])
    assert not rows[~inside].any()
    gradient, = torch.autograd.grad((rows * probe).sum(), table)
    torch.testing.assert_close(gradient.double(), sums(probe.double(), numbers, 8), rtol=1e-6, atol=1e-6)


def test_bf16_rows_are_added_in_fp32():
    """600 times 1 is 600; a sum in bf16 stops at 256."""
    table = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    gradient, = torch.autograd.grad(lookup(table, torch.zeros(600, dtype=torch.int64)).sum(), table)
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [[600.0] * 4, [0.0] * 4]


def test_no_rows():
    table = torch.randn(3, 2, requires_grad=True)
    rows = lookup(table, torch.zeros(0, dtype=torch.int64))
    assert rows.shape == (0, 2)
    assert not torch.autograd.grad(rows.sum(), table)[0].any()


def test_the_operator_is_what_it_says():
    torch.library.opcheck(_sum_by_number, (torch.randn(9, 5), torch.tensor(NUMBERS), 8))


def test_compiled_gradients_repeat_bit_for_bit():
    """Thousands of rows of few numbers in two threads: atomic additions would differ from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compiled = torch.compile(lookup, fullgraph=True, dynamic=False)
        table, numbers = torch.randn(4, 64, requires_grad=True), torch.randint(4, (4096,))
        probe = torch.randn(4096, 64)
        gradients = [torch.autograd.grad((compiled(table, numbers) * probe).sum(), table)[0] for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    torch.testing.assert_close(gradients[0].double(), sums(probe.double(), numbers, 4), rtol=1e-5, atol=1e-4)
