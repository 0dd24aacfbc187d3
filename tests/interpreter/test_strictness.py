"""The interpreter itself: bf16 and TF32 as a GPU computes them, and an error for wrong pointers and wrapped offsets."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _arithmetic(a_ptr, b_ptr, out_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + n + i, a * b)
    tl.store(out_ptr + 2 * n + i, tl.where(a > b, a, b))
    tl.store(out_ptr + 3 * n + i, a - 0.1)
    tl.store(out_ptr + 4 * n + i, (a.to(tl.float32) * 1.2345).to(tl.bfloat16))
    tl.store(out_ptr + 5 * n + i, tl.full((n,), 0.3, tl.bfloat16))
    tl.store(out_ptr + 6 * n + i, tl.max(a, 0) + tl.abs(b))


def test_bf16_rounds_as_pytorch_does():
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty(7, 64, dtype=torch.bfloat16)
    _arithmetic[(1,)](a, b, out, 64)
    # A constant takes the type of the tensor beside it.
    expected = [a + b, a * b, torch.maximum(a, b), a - torch.tensor(0.1).bfloat16(), (a.float() * 1.2345).bfloat16(),
                torch.full_like(a, 0.3), (a.max().float() + b.abs()).bfloat16()]
    assert torch.equal(out, torch.stack(expected))


def test_sums_in_bf16_are_refused():
    @triton.jit
    def total(x_ptr, out_ptr, n: tl.constexpr):
        tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, n)), 0))

    total[(1,)](torch.ones(16), torch.zeros(1), 16)
    with pytest.raises(Exception, match="convert them to fp32"):
        total[(1,)](torch.ones(16).bfloat16(), torch.zeros(1), 16)


def test_casts_to_bf16_break_ties_to_even_and_keep_infinities():
    @triton.jit
    def cast(x_ptr, out_ptr, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))

    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -torch.inf, torch.nan, -0.0, 1e-40, 2.0**-130])
    out = torch.empty(8, dtype=torch.bfloat16)
    cast[(1,)](x, out, 8)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, n: tl.constexpr, precision: tl.constexpr):
    i = tl.arange(0, n)
    square = i[:, None] * n + i
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square), input_precision=precision))


def product(a: Tensor, b: Tensor, precision: str | None) -> float:
    out = torch.empty(len(a), len(a))
    _product[(1,)](a, b, out, len(a), precision)
    exact = a.double() @ b.double()
    return float((out - exact).norm() / exact.norm())


def test_products():
    a, b = torch.randn(32, 32), torch.randn(32, 32)
    assert product(a, b, "ieee") < 1e-6
    assert 1e-4 < product(a, b, None) < 1e-3  # TF32, the compiler's choice for fp32
    assert product(a.bfloat16(), b.bfloat16(), None) < 1e-6
    assert product(a.half(), b.half(), None) < 1e-6
    with pytest.raises(Exception, match="K >= 16"):
        product(a[:8, :8].contiguous(), b[:8, :8].contiguous(), "ieee")


@triton.jit
def _copy(x_ptr, out_ptr, shift, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out_ptr + i, tl.load(x_ptr + i + shift, mask=i < n - 1))


@pytest.mark.parametrize("shift", [-1, 2, 1000])
def test_reading_out_of_bounds_is_an_error(shift):
    _copy[(1,)](torch.ones(16), torch.ones(16), 1, 16)  # the masked element does not count
    with pytest.raises(Exception, match="outside every tensor"):
        _copy[(1,)](torch.ones(16), torch.ones(16), shift, 16)


def test_writing_out_of_bounds_is_an_error():
    with pytest.raises(Exception, match="outside every tensor"):
        _copy[(1,)](torch.ones(16), torch.ones(15), 0, 16)


@triton.jit
def _offset(out_ptr, stride, wide: tl.constexpr):
    row = tl.program_id(0) + 2
    tl.store(out_ptr + (row.to(tl.int64) if wide else row) * stride % 2, 1)


def test_offsets_that_wrap_are_an_error():
    out = torch.zeros(2, dtype=torch.int64)
    _offset[(1,)](out, 2**30, True)
    with pytest.raises(Exception, match="overflow"):
        _offset[(1,)](out, 2**30, False)


def test_new_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
