"""The scan's kernels: what tests/kernels/test_ssd.py asks of the version on a CPU, and what only kernels can get wrong."""

import pytest
import torch
from torch import Tensor

from kernels.ssd import ssd, ssd_with_state
from kernels.ssd import triton as module
from tests.interpreter.memory import sparse
from tests.kernels.test_ssd import (
    NAMES,
    OPTIONS,
    G,
    H,
    N,
    S,
    assert_all_close,
    assert_close,
    closed_form,
    continued,
    inputs,
    packed,
    results,
    segments,
    separate,
    with_states,
)

FP32 = 2e-6
ORDER = [1, 2, 3, 15, 16, 17, 40, 0, 64, 1]  # more than a span of 8 chunks of 16 tokens


@pytest.fixture(scope="module")
def truth() -> tuple[tuple[Tensor, ...], Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    arguments, probe = inputs(sum(ORDER)), torch.randn(sum(ORDER), N, H).bfloat16().double()
    return arguments, probe, results(separate(ORDER), arguments, probe)


@pytest.mark.parametrize("chunk", [1, 20])
def test_each_document_alone(truth, chunk):
    arguments, probe, expected = truth
    got = results(packed(ORDER, implementation="triton", chunk=chunk), arguments, probe, torch.float32)
    assert_close(got, expected, FP32)
    assert all(value.dtype == torch.float32 for value in got.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_as_exact_as_products_in_pytorch(truth, dtype):
    arguments, probe, expected = truth
    got, plain = (results(packed(ORDER, implementation=name), arguments, probe, dtype) for name in ("triton", "chunked"))
    for name in NAMES:
        assert got[name].dtype == dtype
        ours, theirs = (float((value[name].double() - expected[name]).norm() / expected[name].norm()) for value in (got, plain))
        assert ours <= 2 * theirs + torch.finfo(dtype).eps / 2, (name, ours, theirs)  # a single number may be rounded either way


@pytest.mark.parametrize("tokens", [1, 15, 17, 128, 129])
def test_rows_about_as_long_as_a_chunk_or_a_span(tokens):
    arguments, probe = inputs(tokens), torch.randn(tokens, N, H, dtype=torch.float64)
    assert_close(results(packed([tokens], implementation="triton"), arguments, probe, torch.float32),
                 results(separate([tokens]), arguments, probe), FP32)


@pytest.mark.parametrize("cut", [1, 16, 31, 33])
def test_a_row_in_two_calls(cut):
    lengths = [32, 8]
    arguments, probe = inputs(40), torch.randn(40, N, H, dtype=torch.float64)
    assert_close(results(continued(lengths, cut, implementation="triton"), arguments, probe, torch.float32),
                 results(separate(lengths), arguments, probe), FP32)


@pytest.mark.parametrize("lengths", [[135], [30, 10], [1]], ids=str)
def test_initial_and_final_states(lengths):
    expected = with_states(lengths, "reference", torch.float64)
    assert_all_close(with_states(lengths, "triton", torch.float32), expected, FP32)
    bf16 = [with_states(lengths, "triton", torch.bfloat16, state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for got in bf16:
        assert_all_close(got, expected, 1.5e-2)
    assert len(lengths) > 1 or lengths == [1] or any(not torch.equal(*pair) for pair in zip(*bf16, strict=True))


def test_other_shapes():
    """Dimensions that are no powers of two, more groups than one a head, heads without a group's company, larger chunks."""
    for heads, groups, head_dim, state in ((3, 1, 24, 20), (2, 2, 16, 33)):
        x, b, c = (torch.randn(45, *shape) for shape in ((heads, head_dim), (groups, state), (groups, state)))
        dt, a, d = torch.rand(45, heads), -torch.rand(heads), torch.randn(heads)
        outputs = []
        for implementation, dtype in (("reference", torch.float64), ("triton", torch.float32)):
            leaves = [t.to(dtype).requires_grad_() for t in (x, dt, a, b, c, d)]
            fx, fdt, fa, fb, fc, fd = leaves
            y = ssd(fx, fdt, fa, fb, fc, fd, segments([20, 25]), chunk=16, implementation=implementation)
            outputs.append([t.double() for t in (y, *torch.autograd.grad(y.square().sum(), leaves))])
        assert_all_close(outputs[1], outputs[0], FP32)


def test_heads_and_states_wider_than_the_tiles():
    """Cut into narrower heads and several scans, with an initial and a final state."""
    x, b, c, initial = torch.randn(20, 2, 72), torch.randn(20, 1, 130), torch.randn(20, 1, 130), torch.randn(2, 72, 130)
    dt, a, d, probe = torch.rand(20, 2), -torch.rand(2), torch.randn(2), torch.randn(2, 72, 130)
    outputs = []
    for implementation, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, dt, a, b, c, d, initial)]
        fx, fdt, fa, fb, fc, fd, first = leaves
        y, last = ssd_with_state(fx, fdt, fa, fb, fc, fd, segments([20]), chunk=16, initial_state_NHS=first, implementation=implementation)
        loss = y.square().sum() + (last * probe).sum()
        outputs.append([t.double() for t in (y, last, *torch.autograd.grad(loss, leaves))])
    assert_all_close(outputs[1], outputs[0], FP32)


def test_a_document_moves_no_bit_of_its_neighbours():
    arguments, probe = inputs(57), torch.randn(57, N, H, dtype=torch.float64)
    function = packed([7, 20, 30], implementation="triton")
    before = results(function, arguments, probe, torch.float32)
    for t in (*arguments[:2], *arguments[3:5]):
        t[7:27] = torch.randn_like(t[7:27])
    after = results(function, arguments, probe, torch.float32)
    for name in ("y", "x", "dt", "b", "c"):
        assert torch.equal(*(torch.cat((t[name][:7], t[name][27:])) for t in (before, after))), name
        assert not torch.equal(before[name][7:27], after[name][7:27]), name


def test_strong_decay_is_finite():
    x, dt, _, b, c, d, dt_bias = inputs(48)
    arguments = (x, dt, torch.full((N,), -500.0, dtype=torch.float64), b, c, d, dt_bias)
    got = results(packed([20, 28], implementation="triton"), arguments, torch.ones_like(x), torch.float32)
    assert all(value.isfinite().all() for value in got.values())
    expected = results(separate([20, 28]), arguments, torch.ones_like(x))
    for name in ("y", "x", "b", "c", "d"):
        torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-5, atol=1e-5)


def test_states_do_not_lose_small_additions_in_bf16():
    """Each token adds 1/2 to a state that hardly decays: sums in bf16 would stop at 128 in its chunk, and between spans."""
    tokens = 560
    x, ones = (torch.ones(tokens, 1, 1, dtype=torch.bfloat16) for _ in range(2))
    y = ssd(x.requires_grad_(), torch.full((tokens, 1), 0.5), torch.tensor([-1e-7]), ones, ones, None, segments([tokens]), chunk=16,
            dt_softplus=False, implementation="triton")
    expected = torch.arange(1, tokens + 1) / 2
    torch.testing.assert_close(y.flatten().float(), expected, rtol=1 / 100, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0].flatten().float(), expected.flip(0), rtol=1 / 100, atol=0)


def test_numbers_that_come_back_are_new_documents():
    x, dt, a, b, c, d, dt_bias = (t.float() for t in inputs(40))
    lengths = torch.tensor([9, 2, 5, 17, 7])
    unique, again = (torch.repeat_interleave(torch.tensor(ids), lengths) for ids in ([0, 1, 2, 3, 4], [3, 7, 3, -1, 3]))
    y = [ssd(x, dt, a, b, c, d, ids, dt_bias_N=dt_bias, implementation="triton", **OPTIONS) for ids in (unique, again)]
    assert torch.equal(*y)


def test_inputs_and_gradients_with_strides():
    """Views of one wide projection, heads outside tokens, and gradients with strides of 0 and of columns."""
    x, dt, a, b, c, d, dt_bias = inputs(45)
    wide = torch.cat([t.flatten(1) for t in (x, dt, b, c)], 1)
    xs, dts, bs, cs = wide.split([N * H, N, G * S, G * S], 1)
    function = packed([20, 25], implementation="triton")
    layouts = [(xs.unflatten(1, (N, H)), dts, a, bs.unflatten(1, (G, S)), cs.unflatten(1, (G, S)), d, dt_bias),
               (x.transpose(0, 1).contiguous().transpose(0, 1), dt.T.contiguous().T, a, b.mT.contiguous().mT, c, d, dt_bias)]
    for probe in (torch.ones(1, 1, 1, dtype=torch.float64).expand(45, N, H), torch.randn(H, N, 45, dtype=torch.float64).permute(2, 1, 0)):
        expected = results(separate([20, 25]), (x, dt, a, b, c, d, dt_bias), probe)
        for layout in layouts:
            leaves = [t.float().detach().requires_grad_() for t in layout]
            y = function(*leaves)
            got = (y.detach(), *torch.autograd.grad(y, leaves, probe.float()))
            assert_close(dict(zip(NAMES, got, strict=True)), expected, FP32)


def test_offsets_beyond_32_bits():
    tokens, stride = 40, 2**26
    x, dt, a, b, c, d, dt_bias = (t.float() for t in inputs(tokens))
    row = sparse(tokens, stride, N * H + 2 * G * S, torch.float32)
    row.copy_(torch.cat([t.flatten(1) for t in (x, b, c)], 1))
    gradient = sparse(tokens, stride, N * H, torch.float32)
    gradient.copy_(torch.randn(tokens, N * H))
    outputs: list[tuple[Tensor, ...]] = []
    for given, dy in ((row, gradient), (row.clone(), gradient.clone())):
        fx, fb, fc = (t.unflatten(1, (heads, -1)) for t, heads in zip(given.split([N * H, G * S, G * S], 1), (N, G, G), strict=True))
        leaves = [t.detach().requires_grad_() for t in (fx, dt, a, fb, fc, d)]
        fx, fdt, fa, fb, fc, fd = leaves
        y = ssd(fx, fdt, fa, fb, fc, fd, segments([tokens]), dt_bias_N=dt_bias, implementation="triton", **OPTIONS)
        outputs.append((y, *torch.autograd.grad(y, leaves, dy.unflatten(1, (N, H)))))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_repeated_runs_are_bit_equal():
    arguments, probe = inputs(45), torch.randn(45, N, H, dtype=torch.float64)
    runs = [results(packed([20, 25], implementation="triton"), arguments, probe, torch.float32) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in NAMES)


def test_without_tokens():
    x, dt, a, b, c, d, _ = (t.float() for t in inputs(0))
    leaves = [t.requires_grad_() for t in (x, dt, a, b, c, d, torch.randn(N, H, S))]
    *rest, initial = leaves
    y, state, _ = module._forward(*rest, segments([]), initial, 16, torch.float32)
    assert y.shape == x.shape
    assert torch.equal(state, initial)
    gradients = torch.autograd.grad(y.sum() + state.sum(), leaves)
    assert all(not g.any() for g in gradients[:-1])
    assert torch.equal(gradients[-1], torch.ones(N, H, S))


def test_closed_form_without_skip_and_with_a_gate():
    x, dt, a, b, c, d, dt_bias = inputs(20)
    z = torch.randn(20, N, H, dtype=torch.float64)
    fx, fdt, fa, fb, fc = (t.float() for t in (x, dt, a, b, c))
    got = ssd(fx, fdt, fa, fb, fc, None, segments([20]), dt_bias_N=dt_bias.float(), z_TNH=z.float(), implementation="triton", **OPTIONS)
    expected = closed_form(x, dt, a, b, c, torch.zeros_like(d), dt_bias) * z / (1 + torch.exp(-z))
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_operators_pass_opcheck():
    x, dt, a, b, c, d, _ = (t.float() for t in inputs(6))
    dt, documents = dt.abs(), segments([2, 4])
    initial = torch.randn(N, H, S)
    for dtype, first in ((torch.float32, initial.requires_grad_()), (torch.bfloat16, None)):
        arguments = [t.requires_grad_() for t in (x.to(dtype), dt, a, b.to(dtype), c.to(dtype), d)]
        torch.library.opcheck(module._forward, (*arguments, documents, first, 16, dtype))
    with torch.no_grad():
        states = module._forward(x, dt, a, b, c, d, documents, None, 16, torch.float32)[2]
        for dfinal in (None, torch.randn(N, H, S)):
            torch.library.opcheck(module._backward, (torch.randn_like(x), dfinal, x, dt, a, b, c, d, documents, states, 16))


def test_compiles_whole():
    arguments, probe = inputs(45), torch.randn(45, N, H, dtype=torch.float64)
    compiled = torch.compile(packed([20, 25], implementation="triton"), fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(results(compiled, arguments, probe, torch.float32), results(separate([20, 25]), arguments, probe), FP32)
