"""Triton's relative attention against the reference, in tiles of 16 frames."""

import pytest
import torch
from torch import Tensor

from kernels.attention import triton as module
from kernels.ragged import Layout
from tests.interpreter.memory import sparse
from tests.interpreter.test_attention import tiles
from tests.kernels.test_relative_attention import NAMES, assert_close, attend, inputs, layout, results

# Frames outside utterances divide by zero; what comes of it is dropped.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
LENGTHS, GAPS = [17, 1, 0, 33], [1, 2, 0, 20]


@pytest.fixture(autouse=True)
def small_tiles():
    with tiles(16, 16):
        yield


def unused(where: Layout) -> Layout:
    """Two more utterances, which start at 0 and are empty."""
    more = where.lengths_U.new_zeros(2)
    count = len(where.lengths_U)
    segments = torch.where(where.segments_A == count, count + 2, where.segments_A)
    return where._replace(starts_U=torch.cat((where.starts_U, more)), lengths_U=torch.cat((where.lengths_U, more)), segments_A=segments)


@pytest.mark.parametrize("frames", [33, 40])
@pytest.mark.parametrize("change", [lambda where: where, unused], ids=["full", "unused"])
def test_matches_the_reference(frames, change):
    where = change(layout(LENGTHS, GAPS, frames))
    arguments, probe = inputs(where), torch.randn(len(where.segments_A), 3, 4).bfloat16().double()
    expected = results("reference", arguments, where, probe, torch.float64)
    assert_close(results("triton", arguments, where, probe, torch.float32), expected, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_as_plain_pytorch(dtype):
    where = layout([30, 9], [1, 1], 30)
    arguments, probe = inputs(where), torch.randn(len(where.segments_A), 3, 4).bfloat16().double()
    exact = results("reference", arguments, where, probe, torch.float64)
    got, plain = (results(implementation, arguments, where, probe, dtype) for implementation in ("triton", "reference"))
    for name in NAMES:
        ours, theirs = (float((x[name].detach() - exact[name].detach()).norm()) for x in (got, plain))
        assert ours <= 2 * theirs, name


def test_nothing_outside_an_utterance_reaches_it():
    where = layout(LENGTHS, GAPS, 33)
    arguments = [t.float().requires_grad_() for t in inputs(where)]
    own = torch.zeros(len(where.segments_A), dtype=torch.bool)
    start = int(where.starts_U[3])
    own[start : start + 33] = True
    out = attend(arguments, where, "triton")
    for grad in torch.autograd.grad(out[own].square().sum(), arguments[:3]):
        assert not grad[~own].any()
        assert grad[own].any()
    others = [torch.where(own[:, None, None], t, torch.nan) for t in arguments[:3]]
    assert torch.equal(attend([*others, *arguments[3:]], where, "triton")[own], out[own])
    assert not out[where.positions_A >= torch.tensor([*LENGTHS, 0])[where.segments_A]].any()


def test_row_of_nothing_is_zeros_with_gradients_of_zero():
    where = layout([0, 0], [0, 0], 3)
    arguments = [t.float().requires_grad_() for t in inputs(where)]
    out = attend(arguments, where, "triton")
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), arguments))


def test_strided_inputs():
    where = layout([20, 3], [1, 1], 20)
    packed: tuple[Tensor, ...] = torch.randn(len(where.segments_A), 3, 4, 3).unbind(3)
    others = [t.float() for t in inputs(where)[3:]]
    expected = attend([*packed, *others], where, "reference")
    torch.testing.assert_close(attend([*packed, *others], where, "triton"), expected, rtol=1e-5, atol=1e-6)


def test_bias_beyond_32_bits():
    """Rows of the bias that are 2²⁷ numbers wide."""
    rows, width = 20, (1 << 27) + 1
    bias = sparse(rows, width, width, torch.float16)[None]
    distance = torch.arange(rows) - torch.arange(rows)[:, None]
    small = torch.randn(rows, rows).half()
    bias[0, torch.arange(rows)[:, None], width // 2 + distance] = small
    q, k, v = torch.randn(3, rows, 1, 16).half()
    start, end = torch.tensor([0]), torch.tensor([rows])
    out, _ = module.documents_attention(q, k, v, bias, start, end, start, end, False, 0.5, None)
    weights = torch.softmax((q[:, 0].double() @ k[:, 0].double().mT + small.double()) * 0.5, -1)
    torch.testing.assert_close(out[:, 0].double(), weights @ v[:, 0].double(), rtol=2e-3, atol=2e-3)


def test_compiles_to_one_graph():
    where = layout([17, 1], [1, 1], 17)
    arguments = [t.float().requires_grad_() for t in inputs(where)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, expected = (function(arguments, where, "triton") for function in (compiled, attend))
    torch.testing.assert_close(got, expected)
    for one, other in zip(torch.autograd.grad(got.sum(), arguments), torch.autograd.grad(expected.sum(), arguments), strict=True):
        torch.testing.assert_close(one, other)
