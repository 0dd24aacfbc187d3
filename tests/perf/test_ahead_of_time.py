"""What the compiler reports of kernels that are launched without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import driver

from kernels import launch
from perf.ahead_of_time import compiled_kernels


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        a, b = tl.load(a_ptr + i[:, None] * size + start + i), tl.load(b_ptr + (start + i)[:, None] * BLOCK + i)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + i[:, None] * BLOCK + i, total)


def call(size: int = 1024, block: int = 64, dtype: torch.dtype = torch.bfloat16, **options: int) -> None:
    a, b, out = torch.empty(block, size, dtype=dtype), torch.empty(size, block, dtype=dtype), torch.empty(block, block)
    _product[(1,)](a, b, out, size, BLOCK=block, num_warps=4, num_stages=3, **options)


@pytest.mark.parametrize("arch, product, copies", [(80, "HMMA", True), (90, "HGMMA", True)])
def test_instructions_and_resources(arch, product, copies):
    (kernel,) = compiled_kernels(call, arch)
    assert (kernel.name, kernel.arch, kernel.error) == ("_product", arch, "")
    assert kernel.types == ("*bf16", "*bf16", "*fp32", "i32")
    assert kernel.constants == {"BLOCK": 64}
    assert (kernel.warps, kernel.stages, kernel.spill_bytes) == (4, 3, 0)
    assert 30 < kernel.registers <= 255
    assert kernel.shared_bytes >= 2 * 2 * 64 * 64 * 2  # two stages of two tiles
    assert kernel.instructions[product] > 0
    assert ("LDGSTS" in kernel.instructions) == copies
    assert kernel.fits
    assert 0 < kernel.occupancy <= 1


def test_one_entry_a_variant():
    """Sizes that are multiples of 16 share a variant, others have their own."""
    def calls() -> None:
        for size in (1024, 1040, 2048, 1025):
            call(size)

    assert len(compiled_kernels(calls, 90)) == 2


def test_spills_and_limits_show():
    (kernel,) = compiled_kernels(lambda: call(maxnreg=32), 80)
    assert kernel.registers <= 32
    assert kernel.spill_bytes > 0
    (kernel,) = compiled_kernels(lambda: call(block=128), 120)
    assert kernel.shared_bytes > 101_376
    assert not kernel.fits
    assert kernel.occupancy == 0


def test_an_error_is_an_entry_and_nothing_stays_replaced():
    before = driver._active
    (kernel,) = compiled_kernels(lambda: call(block=48), 90)
    assert "power of 2" in kernel.error
    assert driver._active is before
    assert launch.architecture(torch.device("cpu")) == 90
