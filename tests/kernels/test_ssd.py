"""The scan against its closed form, one document at a time: outputs and every gradient, any boundaries, no leaks, fp32 states."""

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ssd import cpu, ssd, ssd_with_state
from kernels.ssd.reference import ssd_reference

N, G, H, S = 4, 2, 8, 6
NAMES = ("y", "x", "dt", "a", "b", "c", "d", "dt_bias")
FAST = ["chunked"]
ALL = ["reference", *FAST]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
LENGTHS = [1, 2, 3, 63, 64, 65, 100]
ORDERS = [LENGTHS, LENGTHS[::-1], [64, 1, 100, 0, 3, 65, 2, 0, 63]]
LOW, HIGH = 0.05, 0.8  # limits of the steps; both apply to some
OPTIONS: dict[str, Any] = {"chunk": 16, "dt_limit": (LOW, HIGH)}
Inputs = tuple[Tensor, ...]


def inputs(tokens: int) -> Inputs:
    """x, dt, a, b, c, d, dt_bias in fp64, of values that bf16 holds exactly."""
    shapes = (tokens, N, H), (tokens, N), (N,), (tokens, G, S), (tokens, G, S), (N,), (N,)
    x, dt, a, b, c, d, dt_bias = (torch.randn(*shape) for shape in shapes)
    return tuple(t.bfloat16().double() for t in (x, 2 * dt, -a.exp(), b, c, d, dt_bias - 2))


def segments(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)).int()


def closed_form(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor | None, low: float = LOW,
                high: float = HIGH) -> Tensor:
    """y_i = sum over j <= i of exp(a (dt_{j+1} + ... + dt_i)) dt_j (c_i . b_j) x_j, plus d x_i; of a single document."""
    dt = torch.log(1 + torch.exp(dt + (0 if dt_bias is None else dt_bias))).clip(low, high)
    y = []
    for n in range(N):
        g = n // (N // G)
        between = dt[:, n].cumsum(0)[:, None] - dt[:, n].cumsum(0)
        mix = torch.tril(torch.exp((a[n] * between).tril()) * (c[:, g] @ b[:, g].T)) * dt[:, n]
        y.append(mix @ x[:, n] + d[n] * x[:, n])
    return torch.stack(y, 1)


def results(function: Callable[..., Tensor], arguments: Inputs, probe: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    leaves = [t.to(dtype).detach().clone().requires_grad_() for t in arguments]
    y = function(*leaves)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad((y * probe.to(dtype)).sum(), leaves)), strict=True))


def packed(lengths: list[int], **options) -> Callable[..., Tensor]:
    documents, options = segments(lengths), OPTIONS | options
    return lambda x, dt, a, b, c, d, dt_bias: ssd(x, dt, a, b, c, d, documents, dt_bias_N=dt_bias, **options)


def separate(lengths: list[int]) -> Callable[..., Tensor]:
    """The closed form of each document alone, one after another."""

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor) -> Tensor:
        pieces = [[t[end - n : end] for t in (x, dt, b, c)] for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)]
        return torch.cat([closed_form(px, pdt, a, pb, pc, d, dt_bias) for px, pdt, pb, pc in pieces])

    return run


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        value, reference = got[name].double(), expected[name].double()
        assert value.shape == reference.shape, name
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), name


@pytest.fixture(scope="module")
def truths() -> list[tuple[Inputs, Tensor, dict[str, Tensor]]]:
    """For each of ORDERS: inputs, gradient of the output, and what the documents give alone."""
    torch.manual_seed(1)
    cases = []
    for lengths in ORDERS:
        arguments, probe = inputs(sum(lengths)), torch.randn(sum(lengths), N, H).bfloat16().double()
        cases.append((arguments, probe, results(separate(lengths), arguments, probe)))
    return cases


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_reference_is_each_document_alone(truths, order):
    arguments, probe, expected = truths[order]
    assert_close(results(packed(ORDERS[order], implementation="reference"), arguments, probe), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk", [1, 16, 64, 300])
@pytest.mark.parametrize("order", range(len(ORDERS)))
@pytest.mark.parametrize("implementation", FAST)
def test_fast_versions_give_each_document_alone(truths, implementation, order, chunk, dtype):
    arguments, probe, expected = truths[order]
    got = results(packed(ORDERS[order], implementation=implementation, chunk=chunk), arguments, probe, dtype)
    assert_close(got, expected, TOLERANCE[dtype])
    assert all(value.dtype == dtype for value in got.values())


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("implementation", FAST)
def test_rows_about_as_long_as_a_chunk(implementation, tokens):
    arguments, probe = inputs(tokens), torch.randn(tokens, N, H, dtype=torch.float64)
    assert_close(results(packed([tokens], implementation=implementation), arguments, probe),
                 results(separate([tokens]), arguments, probe), 1e-12)


@pytest.mark.parametrize("implementation", ALL)
def test_a_document_moves_no_bit_of_its_neighbours(implementation):
    lengths = [7, 20, 30]
    arguments, probe = inputs(57), torch.randn(57, N, H, dtype=torch.float64)
    function = packed(lengths, implementation=implementation)
    before = results(function, arguments, probe, torch.float32)
    for t in (*arguments[:2], *arguments[3:5]):
        t[7:27] = torch.randn_like(t[7:27])
    after = results(function, arguments, probe, torch.float32)
    for name in ("y", "x", "dt", "b", "c"):
        others = torch.cat((before[name][:7], before[name][27:])), torch.cat((after[name][:7], after[name][27:]))
        assert torch.equal(*others), name
        assert not torch.equal(before[name][7:27], after[name][7:27]), name


@pytest.mark.parametrize("implementation", ALL)
def test_strong_decay_is_finite(implementation):
    """exp(|A| dt) overflows: what is above the diagonal has to be masked before it is exponentiated."""
    x, dt, _, b, c, d, dt_bias = inputs(48)
    arguments = (x, dt, torch.full((N,), -500.0, dtype=torch.float64), b, c, d, dt_bias)
    got = results(packed([20, 28], implementation=implementation), arguments, torch.ones_like(x), torch.float32)
    assert all(value.isfinite().all() for value in got.values())
    step = F.softplus(dt + dt_bias).clamp(LOW, HIGH)[..., None]
    now = (x.unflatten(1, (G, -1)) * (b * c).sum(-1)[..., None, None]).flatten(1, 2) * step + d[:, None] * x  # nothing of the past is left
    torch.testing.assert_close(got["y"].double(), now, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", FAST)
def test_states_do_not_lose_small_additions_in_bf16(implementation):
    """1,024 chunks add 1/16 each to a state that hardly decays, and to its gradient: bf16 sums would stop at 16."""
    tokens = 1024
    x, ones = (torch.ones(tokens, 1, 1, dtype=torch.bfloat16) for _ in range(2))
    y = ssd(x.requires_grad_(), torch.full((tokens, 1), 1 / 16), torch.tensor([-1e-6]), ones, ones, torch.zeros(1), segments([tokens]),
            chunk=1, dt_softplus=False, implementation=implementation)
    expected = torch.arange(1, tokens + 1) / 16
    torch.testing.assert_close(y.flatten().float(), expected, rtol=1 / 128, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0].flatten().float(), expected.flip(0), rtol=1 / 128, atol=0)


@pytest.mark.parametrize("implementation", ALL)
def test_every_option_changes_the_result(implementation):
    x, dt, a, b, c, d, dt_bias = inputs(40)

    def run(**options) -> Tensor:
        return ssd(x, dt, a, b, c, d, segments([40]), chunk=16, implementation=implementation, **options)

    plain = closed_form(x, dt, a, b, c, d, None, 0.0, float("inf"))
    torch.testing.assert_close(run(), plain, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(run(dt_bias_N=dt_bias), closed_form(x, dt, a, b, c, d, dt_bias, 0.0, float("inf")), rtol=1e-11, atol=1e-11)
    for low, high in ((0.5, float("inf")), (0.0, 0.5)):
        torch.testing.assert_close(run(dt_limit=(low, high)), closed_form(x, dt, a, b, c, d, None, low, high), rtol=1e-11, atol=1e-11)
        assert float((run(dt_limit=(low, high)) - plain).norm()) > 1e-2 * float(plain.norm())
    steps = torch.log(torch.expm1(dt.clamp(min=1e-3)))  # whose softplus is dt
    torch.testing.assert_close(run(dt_softplus=False, dt_limit=(1e-3, float("inf"))),
                               closed_form(x, steps, a, b, c, d, None, 0.0, float("inf")), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("implementation", FAST)
def test_inputs_and_gradients_with_strides(implementation):
    """Views of one wide projection, as a layer has them, and the gradient of a plain sum, which has strides of 0."""
    x, dt, a, b, c, d, dt_bias = inputs(75)
    wide = torch.cat([t.flatten(1) for t in (x, dt, b, c)], 1)
    xs, dts, bs, cs = wide.split([N * H, N, G * S, G * S], 1)
    views = xs.unflatten(1, (N, H)), dts, a, bs.unflatten(1, (G, S)), cs.unflatten(1, (G, S)), d, dt_bias
    function = packed([30, 45], implementation=implementation)
    expected = results(function, (x, dt, a, b, c, d, dt_bias), torch.ones_like(x))
    leaves = [t.detach().requires_grad_() for t in views]
    y = function(*leaves)
    got = dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y.sum(), leaves)), strict=True))
    assert_close(got, expected, 1e-14)


def continued(lengths: list[int], cut: int, **options) -> Callable[..., Tensor]:
    """The row in two calls, as two ranks or two moments compute it."""
    documents, options = segments(lengths), OPTIONS | options

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor) -> Tensor:
        halves = zip(*(t.split([cut, len(t) - cut]) for t in (x, dt, b, c, documents)), strict=True)
        y, state = [], None
        for px, pdt, pb, pc, part in halves:
            piece, state = ssd_with_state(px, pdt, a, pb, pc, d, part, dt_bias_N=dt_bias, initial_state_NHS=state, **options)
            y.append(piece)
            if documents[cut] != documents[cut - 1]:
                state = None
        return torch.cat(y)

    return run


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 32, 33, 49])
@pytest.mark.parametrize("implementation", ALL)
def test_a_row_in_two_calls(implementation, cut):
    lengths = [32, 18]
    arguments, probe = inputs(50), torch.randn(50, N, H, dtype=torch.float64)
    assert_close(results(continued(lengths, cut, implementation=implementation), arguments, probe),
                 results(separate(lengths), arguments, probe), 1e-12)


def with_states(lengths: list[int], implementation: str, dtype: torch.dtype, **options) -> list[Tensor]:
    """y, final state, and gradients of all inputs and the initial state, in fp64; the same inputs at every call."""
    torch.manual_seed(2)
    tokens = sum(lengths)
    arguments = [*inputs(tokens), torch.randn(N, H, S).bfloat16().double()]
    probes = [torch.randn(*shape).bfloat16().double() for shape in ((tokens, N, H), (N, H, S))]
    leaves = [t.to(dtype).requires_grad_() for t in arguments]
    x, dt, a, b, c, d, dt_bias, initial = leaves
    outputs = ssd_with_state(x, dt, a, b, c, d, segments(lengths), dt_bias_N=dt_bias, initial_state_NHS=initial,
                             implementation=implementation, **OPTIONS | options)
    assert outputs[1].dtype == torch.promote_types(dtype, torch.float32)
    gradients = torch.autograd.grad(outputs, leaves, [p.to(o.dtype) for o, p in zip(outputs, probes, strict=True)])
    return [t.detach().double() for t in (*outputs, *gradients)]


def assert_all_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, (value, reference) in enumerate(zip(got, expected, strict=True)):
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), number


STATE_LENGTHS = [[150], [40, 100, 10], [16, 16], [1, 1], [33]]


@pytest.mark.parametrize("lengths", STATE_LENGTHS, ids=str)
@pytest.mark.parametrize("implementation", FAST)
def test_initial_and_final_states(implementation, lengths):
    expected = with_states(lengths, "reference", torch.float64)
    assert_all_close(with_states(lengths, implementation, torch.float64), expected, 1e-12)
    assert_all_close(with_states(lengths, implementation, torch.float32), expected, 2e-6)
    assert_all_close(with_states(lengths, implementation, torch.bfloat16), expected, 1.5e-2)


@pytest.mark.parametrize("implementation", ALL)
def test_a_final_state_under_strong_decay(implementation):
    """Sums of logarithms from the start of the row would be too large to subtract."""
    x, dt, _, b, c, d, dt_bias = (t.float() for t in inputs(2000))
    a = torch.full((N,), -100.0)
    tail = ssd_with_state(x[-50:], dt[-50:], a, b[-50:], c[-50:], d, segments([50]), dt_bias_N=dt_bias, implementation="reference",
                          **OPTIONS)[1]
    rows = slice(None) if implementation != "reference" else slice(-100, None)
    state = ssd_with_state(x[rows], dt[rows], a, b[rows], c[rows], d, segments([2000])[rows], dt_bias_N=dt_bias,
                           implementation=implementation, **OPTIONS)[1]
    torch.testing.assert_close(state, tail, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", ALL)
def test_numbers_that_come_back_are_new_documents(implementation):
    x, dt, a, b, c, d, dt_bias = inputs(40)
    lengths = torch.tensor([9, 2, 5, 17, 7])
    unique, again = (torch.repeat_interleave(torch.tensor(ids), lengths) for ids in ([0, 1, 2, 3, 4], [3, 7, 3, 3 - 4, 3]))
    y = [ssd(x, dt, a, b, c, d, ids, dt_bias_N=dt_bias, implementation=implementation, **OPTIONS) for ids in (unique, again)]
    assert torch.equal(*y)


@pytest.mark.parametrize("implementation", ALL)
def test_without_tokens(implementation):
    x, dt, a, b, c, d, _ = inputs(0)
    initial = torch.randn(N, H, S, dtype=torch.float64)
    y, state = ssd_with_state(x, dt, a, b, c, d, segments([]), initial_state_NHS=initial, implementation=implementation, **OPTIONS)
    assert y.shape == x.shape
    assert torch.equal(state, initial)


@pytest.mark.parametrize("implementation", ALL)
def test_gate_and_no_skip(implementation):
    x, dt, a, b, c, d, dt_bias = inputs(20)
    z = torch.randn(20, N, H, dtype=torch.float64)
    got = ssd(x, dt, a, b, c, None, segments([20]), dt_bias_N=dt_bias, z_TNH=z, implementation=implementation, **OPTIONS)
    expected = closed_form(x, dt, a, b, c, torch.zeros_like(d), dt_bias) * z / (1 + torch.exp(-z))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def mamba_chunk_scan_combined(x, dt, a, b, c, chunk, *, D, initial_states, seq_idx, dt_limit, return_final_states):
    """What mamba-ssm's documentation says: steps are taken as they are, document 0 continues from the initial states."""
    assert seq_idx.dtype == torch.int32
    assert int(seq_idx[0, 0]) == 0
    assert bool((seq_idx.diff() >= 0).all())
    assert return_final_states
    initial = None if initial_states is None else initial_states[0]
    y, state = ssd_reference(x[0], dt[0].clamp(*dt_limit), a, b[0], c[0], D, seq_idx[0], initial, chunk, torch.float32, True)
    return y[None], state[None]


def test_arguments_of_mamba_ssm(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined",
                        SimpleNamespace(mamba_chunk_scan_combined=mamba_chunk_scan_combined))
    x, dt, a, b, c, d, dt_bias = inputs(40)
    again = torch.repeat_interleave(torch.tensor([3, 7, 3]), torch.tensor([9, 12, 19]))
    state: dict[str, Any] = {"initial_state_NHS": torch.randn(N, H, S, dtype=torch.float64), "z_TNH": torch.randn_like(x)}
    for more in ({}, state):
        theirs, ours = (ssd_with_state(x, dt, a, b, c, d, again, dt_bias_N=dt_bias, implementation=name, **OPTIONS, **more)
                        for name in ("mamba_ssm", "reference"))
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def test_operator_passes_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        added = torch.randn(5, G, S, 3, dtype=dtype).transpose(2, 3).requires_grad_()
        torch.library.opcheck(cpu.carry, (added, torch.rand(5, G, S, requires_grad=True)))


def test_compiles_whole():
    lengths = [1, 30, 40, 4]
    arguments, probe = inputs(75), torch.randn(75, N, H, dtype=torch.float64)
    compiled = torch.compile(packed(lengths), fullgraph=True, dynamic=False)
    assert_close(results(compiled, arguments, probe, torch.float32), results(separate(lengths), arguments, probe), TOLERANCE[torch.float32])
