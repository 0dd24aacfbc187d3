"""Relative attention: the reference against sums over single scores, the fast version against the reference, utterances kept apart."""

import math

import pytest
import torch
from torch import Tensor

from kernels.ragged import Layout
from kernels.relative_attention import relative_attention
from kernels.relative_attention.cpu import backward_op, forward_op

FAST = ["dense", "ragged"]  # Triton needs CUDA or its interpreter
EVERYWHERE = ["reference", *FAST]
NAMES = ("out", "q", "k", "v", "table", "bias_u", "bias_v")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
HEADS, SIZE = 3, 4
LENGTHS = [5, 1, 0, 7, 2]
GAPS = [1, 2, 0, 1, 3]


def layout(lengths: list[int], gaps: list[int], frames: int) -> Layout:
    """Utterances with gaps behind them, then two frames beyond the last."""
    places = [length + gap for length, gap in zip(lengths, gaps, strict=True)]
    starts = [sum(places[:u]) for u in range(len(places))]
    segments = [u for u, place in enumerate(places) for _ in range(place)] + [len(places)] * 2
    positions = [frame for place in [*places, 2] for frame in range(place)]
    return Layout(torch.tensor(starts), torch.tensor(lengths), torch.tensor(segments), torch.tensor(positions), frames)


def inputs(where: Layout) -> list[Tensor]:
    """q, k, v, table and both biases, of values that bf16 holds exactly."""
    shapes = [(len(where.segments_A), HEADS, SIZE)] * 3 + [(2 * where.frames - 1, HEADS, SIZE)] + [(HEADS, SIZE)] * 2
    return [torch.randn(shape).bfloat16().double() for shape in shapes]


def attend(arguments: list[Tensor], where: Layout, implementation: str) -> Tensor:
    q, k, v, table, u, b = arguments
    return relative_attention(q, k, v, table, u, b, where, implementation=implementation)


def results(implementation, arguments, where, probe, dtype) -> dict[str, Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in arguments]
    out = attend(leaves, where, implementation)
    assert out.dtype == dtype
    return dict(zip(NAMES, (out, *torch.autograd.grad((out * probe.to(dtype)).sum(), leaves)), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        value, reference = got[name].detach().double(), expected[name].detach().double()
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), name


def test_reference_is_the_sum_over_single_scores():
    where = layout(LENGTHS, GAPS, 8)
    q, k, v, table, u, b = inputs(where)
    expected = torch.zeros_like(q)
    for start, length in zip(where.starts_U.tolist(), LENGTHS, strict=True):
        for n in range(HEADS):
            for i in range(length):
                weights = []
                for j in range(length):
                    distance = table[7 - (i - j), n]
                    score = (q[start + i, n] + u[n]) @ k[start + j, n] + (q[start + i, n] + b[n]) @ distance
                    weights.append(math.exp(float(score) / math.sqrt(SIZE)))
                for j in range(length):
                    expected[start + i, n] += weights[j] / sum(weights) * v[start + j, n]
    out = relative_attention(q, k, v, table, u, b, where, implementation="reference")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("frames", [7, 10])
@pytest.mark.parametrize("implementation", FAST)
def test_fast_version_matches_the_reference(implementation, frames, dtype):
    where = layout(LENGTHS, GAPS, frames)
    arguments, probe = inputs(where), torch.randn(len(where.segments_A), HEADS, SIZE).bfloat16().double()
    expected = results("reference", arguments, where, probe, torch.float64)
    assert_close(results(implementation, arguments, where, probe, dtype), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", FAST)
def test_strided_inputs(implementation):
    where = layout([4, 3], [1, 1], 4)
    packed = torch.randn(len(where.segments_A), HEADS, SIZE, 3, dtype=torch.float64).unbind(3)
    _, _, _, table, u, b = inputs(where)
    out = attend([*packed, table, u, b], where, implementation)
    expected = attend([*packed, table, u, b], where, "reference")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_nothing_outside_an_utterance_reaches_it(implementation):
    where = layout(LENGTHS, GAPS, 7)
    arguments = [t.requires_grad_() for t in inputs(where)]
    own = torch.zeros(len(where.segments_A), dtype=torch.bool)
    start = int(where.starts_U[3])
    own[start : start + 7] = True
    out = attend(arguments, where, implementation)
    for grad in torch.autograd.grad(out[own].square().sum(), arguments[:3]):
        assert not grad[~own].any()
        assert grad[own].any()
    others = [torch.where(own[:, None, None], t, 1e4 * torch.randn_like(t)) for t in arguments[:3]]
    assert torch.equal(attend([*others, *arguments[3:]], where, implementation)[own], out[own])
    assert not out[where.positions_A >= torch.tensor([*LENGTHS, 0])[where.segments_A]].any()


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_row_of_nothing_is_zeros_with_gradients_of_zero(implementation):
    where = layout([0, 0], [0, 0], 3)
    arguments = [t.requires_grad_() for t in inputs(where)]
    out = attend(arguments, where, implementation)
    assert not out.any()
    if out.requires_grad:
        assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), arguments))


@pytest.mark.parametrize("implementation", FAST)
def test_compiles_to_one_graph(implementation):
    where = layout(LENGTHS, GAPS, 7)
    arguments = [t.requires_grad_() for t in inputs(where)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")  # fusion is not what is in question
    got, expected = (function(arguments, where, implementation) for function in (compiled, attend))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(got.sum(), arguments), torch.autograd.grad(expected.sum(), arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_operators_keep_the_compilers_contract():
    where = layout(LENGTHS, GAPS, 7)
    arguments = [t.float().requires_grad_() for t in inputs(where)]
    torch.library.opcheck(forward_op, (*arguments, where.starts_U, where.lengths_U))
    detached = [t.detach() for t in arguments]
    torch.library.opcheck(backward_op, (detached[0], *detached, where.starts_U, where.lengths_U))
