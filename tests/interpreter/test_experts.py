"""Experts in tiles of 16 rows, 32 columns and steps of 32: values and every gradient, edges of tiles, routing of every kind, memory."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.activation import activate
from kernels.experts import experts, grouped_gemm, triton
from kernels.experts.grouped import _groups_kernel, _rows_kernel, multiply_groups, multiply_rows, plan, schedule
from kernels.experts.routing import route
from tests.kernels.test_experts import NAMES, assert_close, results

TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2}
LOOPING = ("_up_kernel", "_rows_kernel", "_hidden_backward_kernel")  # over tiles; RESIDENT programs a multiprocessor
LARGE = 2**31


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(launch.forced("_groups_kernel", TILE))
        for kernel in LOOPING:
            stack.enter_context(launch.forced(kernel, TILE | {"RESIDENT": 1}))
        yield


def inputs(ids: Tensor, experts: int = 5, d: int = 40, f: int = 36, activation: str = "relu2") -> tuple[Tensor, ...]:
    """x, ids, weights, up, down in fp64, of values that 16 bits hold exactly, weights of experts as large as in a model."""
    width = f * (2 if activation == "swiglu" else 1)
    x = torch.randn(len(ids), d).half().bfloat16().double()
    up, down = ((torch.randn(*shape) * shape[-1] ** -0.5).bfloat16().double() for shape in ((experts, width, d), (experts, d, f)))
    return x, ids, 0.5 + torch.rand(ids.shape).double(), up, down


def counted(*counts: int, absent: int = 0) -> Tensor:
    """One choice a token, in random order: counts[e] for expert e, `absent` for none. [T, 1]"""
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.full((absent,), len(counts) + 3)])
    return ids[torch.randperm(len(ids))][:, None]


def random(tokens: int, experts: int, choices: int, shift: int = 0) -> Tensor:
    return torch.stack([torch.randperm(experts)[:choices] + shift for _ in range(tokens)])


def both(arguments: tuple[Tensor, ...], dtype: torch.dtype, activation: str, implementation: str = "triton") -> tuple[dict, dict]:
    """Results in dtype, and the reference's in fp64."""
    torch.manual_seed(1)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    options = dict(activation=activation)
    return (results(experts, arguments, probe, dtype, implementation=implementation, **options),
            results(experts, arguments, probe, torch.float64, implementation="reference", **options))


def zipf(tokens: int, n_experts: int, choices: int) -> Tensor:
    chances = (1 / torch.arange(1, n_experts + 1) ** 1.5).expand(tokens, -1)
    return torch.multinomial(chances, choices)


ROUTINGS = {
    "random": lambda: (random(37, 5, 3), 5),
    "out of range": lambda: (random(37, 11, 3, shift=-3), 5),
    "Zipf": lambda: (zipf(40, 8, 2), 8),
    "edges of tiles, empty first and last": lambda: (counted(0, 15, 16, 17, 1, 0, 33, 0, absent=7), 8),
    "one hot expert": lambda: (torch.full((35, 1), 2), 5),
    "all experts": lambda: (random(9, 4, 4), 4),
    "one expert": lambda: (torch.zeros(17, 1, dtype=torch.int64), 1),
    "one token": lambda: (torch.tensor([[4, 1]]), 5),
    "twice the same expert": lambda: (torch.tensor([[2, 2], [1, 2]]), 5),
}


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_fp32_matches_the_reference(routing, activation):
    ids, n_experts = ROUTINGS[routing]()
    got, expected = both(inputs(ids, n_experts, activation=activation), torch.float32, activation)
    assert_close(got, expected, 1e-6)
    for name in ("up", "down"):  # exactly, also for experts without tokens
        assert [bool(w.any()) for w in got[name]] == [bool((ids == e).any()) for e in range(n_experts)]


@pytest.mark.parametrize("d,f", [(31, 33), (32, 32), (33, 31), (65, 16), (16, 64), (1, 1)])
def test_widths_around_a_tile(d, f):
    for activation in ("relu2", "swiglu"):
        got, expected = both(inputs(counted(3, 17, 0), 3, d, f, activation), torch.float32, activation)
        assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_as_close_as_plain_pytorch(dtype, activation):
    arguments = inputs(random(33, 7, 3, shift=-1), activation=activation)
    got, exact = both(arguments, dtype, activation)
    plain, _ = both(arguments, dtype, activation, "reference")
    for name in NAMES:
        ours, theirs = (float((r[name].detach().double() - exact[name].detach()).norm()) for r in (got, plain))
        assert ours <= 1.2 * theirs, name
    assert [got[name].dtype for name in NAMES] == [dtype, dtype, torch.float32, dtype, dtype]


@pytest.mark.parametrize("ids", [torch.full((5, 2), -1), torch.full((5, 2), 5), torch.zeros(0, 2, dtype=torch.int64)],
                         ids=["all below", "all above", "no tokens"])
def test_nothing_to_do(ids):
    got, _ = both(inputs(ids, activation="swiglu"), torch.float32, "swiglu")
    assert got["y"].shape == (len(ids), 40)
    assert not any(got[name].any() for name in NAMES)


def test_fp32_weights_get_gradients_that_were_never_rounded():
    x, ids, weights, up, down = inputs(random(33, 5, 3))
    dy = torch.randn_like(x).bfloat16()
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.bfloat16().requires_grad_(), up.to(dtype).requires_grad_(), down.to(dtype).requires_grad_()]
        y = experts(leaves[0], ids, weights.float(), *leaves[1:], activation="relu2", implementation="triton")
        grads[dtype] = y, *torch.autograd.grad(y, leaves, dy)
    for wide, narrow in zip(grads[torch.float32], grads[torch.bfloat16], strict=True):
        assert torch.equal(wide.bfloat16(), narrow)
    for wide in grads[torch.float32][2:]:
        assert wide.dtype == torch.float32
        assert not torch.equal(wide.bfloat16().float(), wide)


def test_strides_of_inputs_and_gradients():
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in inputs(random(20, 5, 3)))
    plain = [t.requires_grad_() for t in (x, weights, up, down)]
    odd = [torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_() for t in plain]
    odd[2] = up.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    odd_ids = ids.t().contiguous().t()
    assert not any(t.is_contiguous() for t in (*odd, odd_ids))
    ys = [experts(x, i, *rest, activation="relu2", implementation="triton") for (x, *rest), i in ((odd, odd_ids), (plain, ids))]
    got, expected = (torch.autograd.grad(y.sum(), leaves) for y, leaves in zip(ys, (odd, plain), strict=True))  # strides of 0
    assert all(torch.equal(a, b) for a, b in zip((ys[0], *got), (ys[1], *expected), strict=True))


def test_a_token_outside_spoils_nothing_and_nan_does_not_vanish():
    ids = random(33, 5, 3)
    ids[0] = 5
    arguments = inputs(ids)
    clean, _ = both(arguments, torch.float32, "relu2")
    arguments[0][0] = float("nan")
    arguments[2][0] = float("nan")
    got, _ = both(arguments, torch.float32, "relu2")
    assert all(torch.equal(got[name], clean[name]) for name in NAMES)
    arguments[0][1] = float("nan")
    got, _ = both(arguments, torch.float32, "relu2")
    assert got["y"][1].isnan().all()
    assert got["y"][2:].isfinite().all()


def test_slices_of_the_experts_sum_to_the_whole():
    x, ids, weights, up, down = arguments = inputs(random(33, 5, 3))
    _, whole = both(arguments, torch.float32, "relu2")
    parts = [both((x, ids - first, weights, up[first:last], down[first:last]), torch.float32, "relu2")[0]
             for first, last in ((0, 2), (2, 5))]
    joined = {name: parts[0][name] + parts[1][name] for name in ("y", "x", "weights")}
    joined |= {name: torch.cat([part[name] for part in parts]) for name in ("up", "down")}
    assert_close(joined, whole, 1e-6)


def test_twice_the_same_bits():
    arguments = inputs(random(33, 5, 3))
    first, second = (both(arguments, torch.bfloat16, "relu2")[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("wanted", ["x", "weights", "up", "down"])
def test_gradients_are_computed_where_wanted(monkeypatch, wanted):
    """Frozen experts cost no products for their gradients."""
    products: list[str] = []

    def counted_calls(name, function):
        def call(*args, **options):
            products.append(name)
            return function(*args, **options)

        return call

    for name in ("multiply_groups", "multiply_rows"):
        monkeypatch.setattr(triton, name, counted_calls(name, getattr(triton, name)))
    arguments = inputs(random(20, 5, 3))
    everything, _ = both(arguments, torch.float32, "relu2")
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in arguments)
    named = dict(x=x, weights=weights, up=up, down=down)
    named[wanted].requires_grad_()
    y = experts(x, ids, weights, up, down, activation="relu2", implementation="triton")
    torch.manual_seed(1)
    probe = torch.randn_like(arguments[0]).bfloat16().float()
    products.clear()
    grad, = torch.autograd.grad(y, named[wanted], probe)
    assert torch.equal(grad, everything[wanted])
    assert products == {"x": ["multiply_rows"], "weights": [], "up": ["multiply_groups"], "down": ["multiply_groups"]}[wanted]


@pytest.mark.parametrize(("keep", "rows"), [(True, 60), (False, 0)])
def test_backward_keeps_the_input_and_the_pre_activation_alone(keep, rows):
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in inputs(random(20, 5, 3)))
    saved: list[Tensor] = []
    leaves = [t.requires_grad_() for t in (x, weights, up, down)]

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(leaves[0], ids, *leaves[1:], activation="relu2", implementation="triton", keep_hidden=keep)
    floats = [tuple(t.shape) for t in saved if t.is_floating_point()]
    assert sorted(floats) == sorted([*(tuple(t.shape) for t in leaves), (rows, 36)])


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_pre_activations_that_are_computed_again_change_no_gradient(activation):
    arguments = inputs(random(37, 11, 3, shift=-3), activation=activation)
    probe = torch.randn_like(arguments[0])
    kept, again = (results(experts, arguments, probe, torch.float32, activation=activation, implementation="triton", keep_hidden=keep)
                   for keep in (True, False))
    assert all(torch.equal(kept[name], again[name]) for name in NAMES)


@pytest.mark.parametrize("counts", [(0, 15, 16, 17, 0), (0, 0, 0), (160, 0, 1), (1,), (16 * 130, 3)])
def test_schedule(counts):
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    tiles, count = schedule(offsets, int(offsets[-1]), 16)
    expected = [[e, first, int(offsets[e + 1])] for e in range(len(counts)) for first in range(int(offsets[e]), int(offsets[e + 1]), 16)]
    assert count.tolist() == [len(expected)]
    assert tiles[: len(expected)].tolist() == expected
    assert len(tiles) <= sum(counts) // 16 + len(counts)


def test_a_bound_that_is_reached():
    """As many tiles as any sizes of groups can need: every group ends one row into a tile."""
    offsets = torch.tensor([0, 17, 34, 51]).int()
    tiles, count = schedule(offsets, 51, 16)
    assert count.tolist() == [len(tiles)]


def grouped(counts: tuple[int, ...], tail: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.randn(sum(counts) + tail, 40, dtype=dtype), torch.randn(len(counts), 36, 40, dtype=dtype)
    return a.requires_grad_(), b.requires_grad_(), torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize("counts,tail", [((0, 17, 3, 0), 5), ((16, 32), 0), ((0, 0), 4)])
def test_grouped_gemm(counts, tail):
    a, b, offsets = grouped(counts, tail, torch.float32)
    used = sum(counts)
    exact_a, exact_b = (t.detach().double().requires_grad_() for t in (a, b))
    expected = torch.cat([part @ w.t() for part, w in zip(exact_a[:used].split(counts), exact_b, strict=True)]
                         + [exact_a.new_zeros(tail, 36)])
    with torch.no_grad():
        a[used:] = float("nan")  # as memory that nothing was written to
    dy = torch.randn(len(a), 36)
    got = grouped_gemm(a, b, offsets)
    pairs = zip((got, *torch.autograd.grad(got, (a, b), dy)),
                (expected, *torch.autograd.grad(expected, (exact_a, exact_b), dy.double())), strict=True)
    for value, reference in pairs:
        assert float((value.detach().double() - reference.detach()).norm()) <= 1e-6 * float(reference.detach().norm())


def test_operators_pass_opcheck():
    arguments = inputs(random(5, 3, 2), 3, 16, 8, activation="swiglu")
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in arguments)
    routing = route(ids, 3)
    h = torch.randn(10, 16)
    leaves = [t.requires_grad_() for t in (x, weights, up, down)]
    torch.library.opcheck(triton._experts_op, (*leaves, *routing, "swiglu", True))
    torch.library.opcheck(triton._experts_op, (*leaves, *routing, "swiglu", False))
    without_autograd: list[tuple[Any, tuple[Any, ...]]] = [
        (triton._hidden_backward_op, (x.detach(), h, weights.detach(), down.detach(), *routing[:3], "swiglu")),
        (triton.combine, (h, routing.slots_TK, weights.detach())),
        (triton.combine, (h, routing.slots_TK)),
        (multiply_rows, (x.detach(), up.detach().transpose(1, 2), routing.offsets_E1, routing.token_R)),
        (multiply_groups, (h, x.detach(), routing.offsets_E1, torch.float32, None, routing.token_R))]
    for operator, arguments in without_autograd:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.reedling.grouped_gemm.default, grouped((2, 0, 3), 2, torch.float32))


def test_compiles_whole_and_once_for_any_number_of_tokens():
    def step(x, ids, weights, up, down):
        return experts(2 * x, ids, weights, up, down, activation="swiglu", implementation="triton").square()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (20, 31):
        arguments = inputs(random(tokens, 7, 3, shift=-1), activation="swiglu")
        probe = torch.randn_like(arguments[0]).bfloat16().double()
        with torch.compiler.set_stance("default" if tokens == 20 else "fail_on_recompile"):
            got = results(compiled, arguments, probe, torch.float32)
        expected = results(step, arguments, probe, torch.float32)
        assert all(torch.equal(got[name], expected[name]) for name in NAMES)


@pytest.fixture
def virtual(tmp_path) -> Callable[..., Tensor]:
    """Makes zeros that take memory and disk only where they are written."""
    numbers = itertools.count()

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.from_file(str(tmp_path / str(next(numbers))), shared=True, size=size, dtype=dtype).view(shape)

    return make


def test_rows_whose_offsets_need_64_bits(virtual):
    """A tile far down in the gathered operand, in the result and among the groups."""
    width, last = 64, LARGE // 64 + 40
    a, out = virtual(last + 1, width), virtual(last + 1, width)
    a[last] = torch.randn(width)
    b = virtual(4, 2**14, 2**16)  # 2^30 elements a group
    b[3, :width, :width] = torch.randn(width, width)
    tiles = torch.tensor([[3, last, last + 1]], dtype=torch.int32)
    constants = TILE | dict(EVEN_K=True, GATHER=False)
    _rows_kernel[(1,)](a, None, b, out, tiles, torch.ones(1, dtype=torch.int32), width, width, *b.stride(), **constants)
    torch.testing.assert_close(out[last], a[last] @ b[3, :width, :width])
    gathered = torch.empty(1, width)
    _rows_kernel[(1,)](a, torch.tensor([last], dtype=torch.int32), b, gathered, torch.tensor([[3, 0, 1]], dtype=torch.int32),
                       torch.ones(1, dtype=torch.int32), width, width, *b.stride(), **constants | dict(GATHER=True))
    assert torch.equal(gathered[0], out[last])


def test_groups_whose_offsets_need_64_bits(virtual):
    width, last = 64, LARGE // 64 + 40
    a, b = virtual(last + 1, width), virtual(last + 1, width)
    a[last], b[last] = torch.randn(width), torch.randn(width)
    rows = torch.tensor([last], dtype=torch.int32)
    torch.testing.assert_close(multiply_groups(a, b, torch.tensor([0, 1], dtype=torch.int32), torch.float32, rows, rows)[0],
                               torch.outer(a[last], b[last]))
    torch.testing.assert_close(multiply_groups(a, b, torch.tensor([last, last + 1], dtype=torch.int32), torch.float32)[0],
                               torch.outer(a[last], b[last]))
    side = 2**15
    out = virtual(3, side, side)
    wide = torch.randn(1, side)
    _groups_kernel[(1, 3)](wide, None, wide, None, out, torch.tensor([0, 0, 0, 1], dtype=torch.int32), side, side, **TILE,
                           GATHER_A=False, GATHER_B=False)
    torch.testing.assert_close(out[2, :16, :32], torch.outer(wide[0, :16], wide[0, :32]))


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_hidden_rows_whose_offsets_need_64_bits(virtual, activation):
    f, width = 64, 2 if activation == "swiglu" else 1
    last = LARGE // 64 + 40
    x, weights = torch.randn(1, 32), torch.rand(1, 1)
    up, down = torch.randn(1, f * width, 32), torch.randn(1, 32, f)
    h, act = virtual(last + 1, f * width), virtual(last + 1, f)
    token = virtual(last + 1, dtype=torch.int32)
    tiles, one = torch.tensor([[0, last, last + 1]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    constants = TILE | dict(EVEN_K=True, ACTIVATION=activation)
    triton._up_kernel[(1,)](x, token, up, h, act, tiles, one, f, 32, **constants, KEEP=True)
    torch.testing.assert_close(h[last], up[0] @ x[0])
    torch.testing.assert_close(act[last], activate(h[last], activation))
    dh, weighted, dweights = virtual(last + 1, f * width), virtual(last + 1, f), torch.zeros(2, 1)
    triton._hidden_backward_kernel[(1,)](x, token, token, weights, down, h, dh, weighted, dweights, tiles, one, f, 32, 1, **constants)
    torch.testing.assert_close(weighted[last], act[last] * weights[0])
    torch.testing.assert_close(dweights.sum(), act[last] @ (x[0] @ down[0]), rtol=1e-5, atol=1e-5)  # products of 32 and of 64 numbers


def test_combined_rows_whose_offsets_need_64_bits(virtual):
    last = LARGE // 64 + 40
    rows = virtual(last + 1, 64)
    rows[last] = torch.randn(64)
    assert torch.equal(triton.combine(rows, torch.tensor([[last, -1]], dtype=torch.int32))[0], rows[last])


def test_more_work_than_programs():
    """Programs that stay take several tiles each."""
    offsets = torch.tensor([0, 100], dtype=torch.int32)
    _, (tiles, _), grid = plan("_rows_kernel", torch.empty(100, 40), offsets, 100, 70, 40)
    assert grid == (launch.INTERPRETED_PROCESSORS,)
    assert len(tiles) * 3 > grid[0]
