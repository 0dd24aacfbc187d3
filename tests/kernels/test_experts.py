"""Experts against a loop over tokens in fp64: output and every gradient, expert numbers out of range, empty and hot experts, slices."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts import IMPLEMENTATIONS, cpu, experts
from kernels.linear import ENVIRONMENT

NAMES = ("y", "x", "weights", "up", "down")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
FAST = [name for name in IMPLEMENTATIONS if name not in ("reference", "triton")]  # tests/interpreter has the tests of "triton"
E, D, FFN = 5, 16, 24


def one_token(x: Tensor, ids: list[int], weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """What a single token's chosen experts give."""
    y = torch.zeros_like(x)
    for k, e in enumerate(ids):
        if 0 <= e < len(up):
            h = up[e] @ x
            act = torch.clamp(h, min=0) ** 2 if activation == "relu2" else F.silu(h[: len(h) // 2]) * h[len(h) // 2 :]
            y = y + weights[k] * (down[e] @ act)
    return y


def by_token(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str) -> Tensor:
    return torch.stack([one_token(x[t], ids[t].tolist(), weights[t], up, down, activation) for t in range(len(x))])


def inputs(ids: Tensor, activation: str = "relu2") -> tuple[Tensor, ...]:
    """x, ids, weights, up, down in fp64, of values that bf16 holds exactly."""
    width = FFN * (2 if activation == "swiglu" else 1)
    shapes = (len(ids), D), (E, width, D), (E, D, FFN)
    x, up, down = (torch.randn(*shape).bfloat16().double() for shape in shapes)
    return x, ids, 0.5 + torch.rand(ids.shape, dtype=torch.float64), up, down


def routing(case: str) -> Tensor:
    """int64 [T, K]"""
    if case == "random":
        return torch.stack([torch.randperm(E)[:3] for _ in range(75)])
    if case == "out of range":
        return torch.stack([torch.randperm(E + 4)[:3] - 2 for _ in range(75)])
    if case == "one hot expert":
        return torch.full((75, 1), 3)
    if case == "empty experts":
        return torch.stack([torch.randperm(2)[:2] * 2 + 1 for _ in range(75)])
    if case == "exact multiples":  # no padding at all
        return torch.arange(E)[:, None].repeat(cpu.ROWS, 2)
    if case == "one token":
        return torch.tensor([[4, 1]])
    if case == "nothing here":
        return torch.tensor([[-1, E], [E + 7, -5]])
    return torch.zeros(0, 2, dtype=torch.int64)


def results(function, arguments: tuple[Tensor, ...], probe: Tensor, dtype: torch.dtype, **options) -> dict[str, Tensor]:
    """Output and gradients; the router's weights stay in fp32 or wider."""
    x, ids, weights, up, down = arguments
    wide = torch.promote_types(dtype, torch.float32)
    x, up, down = (t.to(dtype).detach().clone().requires_grad_() for t in (x, up, down))
    weights = weights.to(wide).detach().clone().requires_grad_()
    y = function(x, ids, weights, up, down, **options)
    return dict(zip(NAMES, (y, *torch.autograd.grad((y * probe.to(dtype)).sum(), (x, weights, up, down))), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        value, reference = got[name].detach().double(), expected[name].detach().double()
        assert value.shape == reference.shape, name
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), name


CASES = ["random", "out of range", "one hot expert", "empty experts", "exact multiples", "one token", "nothing here"]


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("case", CASES)
def test_reference_is_a_loop_over_tokens(case, activation):
    arguments = inputs(routing(case), activation)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(by_token, arguments, probe, torch.float64, activation=activation) if case != "nothing here" else None
    got = results(experts, arguments, probe, torch.float64, activation=activation, implementation="reference")
    if expected is None:
        assert all(not value.any() for value in got.values())
    else:
        assert_close(got, expected, 1e-14)


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("case", CASES)
def test_cpu_matches_the_reference(monkeypatch, case, activation, dtype, library):
    monkeypatch.setenv(ENVIRONMENT, library)
    arguments = inputs(routing(case), activation)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(experts, arguments, probe, torch.float64, activation=activation, implementation="reference")
    got = results(experts, arguments, probe, dtype, activation=activation, implementation="cpu")
    assert_close(got, expected, TOLERANCE[dtype])
    assert [got[name].dtype for name in ("y", "x", "up", "down")] == [dtype] * 4
    assert got["weights"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["grouped_mm", "loop"])
def test_adapters_match_the_reference(implementation, case, activation, dtype):
    arguments = inputs(routing(case), activation)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(experts, arguments, probe, torch.float64, activation=activation, implementation="reference")
    got = results(experts, arguments, probe, dtype, activation=activation, implementation=implementation)
    assert_close(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", FAST)
def test_experts_without_tokens_get_gradients_of_zero(implementation):
    arguments = inputs(routing("empty experts"))
    got = results(experts, arguments, torch.randn_like(arguments[0]), torch.float32, activation="relu2", implementation=implementation)
    for name in ("up", "down"):
        assert [bool(got[name][e].any()) for e in range(E)] == [False, True, False, True, False]
        assert got[name].isfinite().all()


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_no_tokens(implementation):
    arguments = inputs(routing("no tokens"))
    got = results(experts, arguments, arguments[0], torch.float32, activation="relu2", implementation=implementation)
    assert got["y"].shape == (0, D)
    assert not got["up"].any()
    assert not got["down"].any()


@pytest.mark.parametrize("implementation", FAST)
def test_a_token_outside_spoils_nothing(implementation):
    """Rows that pad an expert, and tokens without an expert, take no part even when they hold no finite number."""
    ids = routing("random")
    ids[0] = E
    arguments = inputs(ids)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    clean = results(experts, arguments, probe, torch.float32, activation="relu2", implementation=implementation)
    arguments[0][0] = float("nan")
    got = results(experts, arguments, probe, torch.float32, activation="relu2", implementation=implementation)
    assert all(torch.equal(got[name], clean[name]) for name in NAMES)


def test_the_weight_of_a_token_outside_spoils_nothing():
    """Nor does that of the first choice stand for what padding rows have."""
    ids = routing("random")
    ids[0] = E
    arguments = inputs(ids)
    probe = torch.randn_like(arguments[0])
    clean = results(experts, arguments, probe, torch.float32, activation="relu2", implementation="cpu")
    arguments[2][0] = float("nan")
    got = results(experts, arguments, probe, torch.float32, activation="relu2", implementation="cpu")
    assert all(torch.equal(got[name], clean[name]) for name in NAMES)


@pytest.mark.parametrize("implementation", FAST)
def test_slices_of_the_experts_sum_to_the_whole(implementation):
    """Each rank of an expert-parallel group subtracts its first expert and skips what falls outside."""
    arguments = inputs(routing("random"))
    x, ids, weights, up, down = arguments
    probe = torch.randn_like(x).bfloat16().double()
    whole = results(experts, arguments, probe, torch.float64, activation="relu2", implementation="reference")
    parts = [results(experts, (x, ids - first, weights, up[first:last], down[first:last]), probe, torch.float32, activation="relu2",
                     implementation=implementation) for first, last in ((0, 2), (2, 5))]
    joined = {name: parts[0][name] + parts[1][name] for name in ("y", "x", "weights")}
    joined |= {name: torch.cat([part[name] for part in parts]) for name in ("up", "down")}
    assert_close(joined, whole, 1e-6)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_pre_activations_that_are_computed_again_change_no_gradient(activation):
    arguments = inputs(routing("out of range"), activation)
    probe = torch.randn_like(arguments[0])
    kept, again = (results(experts, arguments, probe, torch.float32, activation=activation, implementation="cpu", keep_hidden=keep)
                   for keep in (True, False))
    assert all(torch.equal(kept[name], again[name]) for name in NAMES)


@pytest.mark.parametrize("keep", [True, False])
def test_backward_keeps_the_input_and_the_pre_activation_alone(keep):
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in inputs(routing("random")))
    saved: list[tuple[int, ...]] = []
    leaves = [t.requires_grad_() for t in (x, weights, up, down)]

    def pack(t: Tensor) -> Tensor:
        saved.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(leaves[0], ids, *leaves[1:], activation="relu2", implementation="cpu", keep_hidden=keep)
    own = [tuple(t.shape) for t in (x, ids, weights, up, down)]
    assert sorted(saved) == sorted([*own, ((ids.numel() + E * (cpu.ROWS - 1)) * keep, FFN)])


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("up", "down")], ids=str)
def test_frozen_weights_get_no_product_and_change_no_other_gradient(monkeypatch, frozen):
    x, ids, weights, up, down = inputs(routing("random"))
    probe = torch.randn(len(x), D, dtype=torch.float64)
    whole = results(experts, (x, ids, weights, up, down), probe, torch.float64, activation="relu2", implementation="cpu")
    leaves = {"x": x.requires_grad_(), "weights": weights.requires_grad_(), "up": up.requires_grad_("up" not in frozen),
              "down": down.requires_grad_("down" not in frozen)}
    y = experts(x, ids, weights, up, down, activation="relu2", implementation="cpu")
    wanted = [name for name in leaves if name not in frozen]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        grads = torch.autograd.grad((y * probe).sum(), [leaves[name] for name in wanted])
    assert all(torch.equal(grad, whole[name]) for name, grad in zip(wanted, grads, strict=True))
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == (4 - len(frozen)) * len(ids.unique())  # of each expert with tokens


def test_rows_of_an_expert_are_padded():
    """oneDNN keeps kernels for few shapes."""
    arguments = inputs(routing("random"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        results(experts, arguments, arguments[0], torch.float64, activation="relu2", implementation="cpu")
    sizes = {size for event in profile.events() if event.name == "aten::mm" for shape in event.input_shapes[:2] for size in shape}
    assert sizes - {D, FFN}
    assert all(size % cpu.ROWS == 0 for size in sizes - {D, FFN})


def test_sizes_that_do_not_fit_are_refused():
    """Not read beyond their end."""
    x, ids, weights, up, down = inputs(routing("random"))
    with pytest.raises(ValueError, match=r"^swiglu of up \[5, 24, 16\] does not give what down \[5, 16, 24\] takes"):
        experts(x, ids, weights, up, down, activation="swiglu", implementation="cpu")
    with pytest.raises(ValueError, match=r"^x \[75, 15\], up \[5, 24, 16\] and down \[5, 16, 24\] do not fit"):
        experts(x[:, 1:], ids, weights, up, down, activation="relu2", implementation="cpu")
    with pytest.raises(ValueError, match=r"^x \[75, 16\] has choices \[74, 3\] with weights \[75, 3\]"):
        experts(x, ids[1:], weights, up, down, activation="relu2", implementation="cpu")


def test_one_thread_gives_the_same_bits():
    """A product that runs on one core does not depend on which."""
    arguments = inputs(routing("random"), "swiglu")
    probe = torch.randn_like(arguments[0]).double()
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(experts, arguments, probe, torch.float32, activation="swiglu", implementation="cpu"))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_twice_the_same_bits():
    arguments = inputs(routing("random"))
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    first, second = (results(experts, arguments, probe, torch.float32, activation="relu2", implementation="cpu") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_operators_pass_opcheck():
    x, ids, weights, up, down = (t.float() if t.is_floating_point() else t for t in inputs(routing("out of range")))
    leaves = [t.requires_grad_() for t in (x, weights, up, down)]
    torch.library.opcheck(cpu._experts_op, (leaves[0], ids, *leaves[1:], "relu2", True),
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    torch.library.opcheck(cpu._experts_op, (leaves[0], ids, *leaves[1:], "relu2", False), test_utils=("test_schema", "test_faketensor"))
    x, weights, up, down = (t.detach() for t in leaves)
    arguments = x, x.new_empty(0, FFN), x, ids, weights.t().contiguous().t(), up, down, "relu2", False, True, False
    torch.library.opcheck(cpu._experts_backward_op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("implementation", ["cpu", "grouped_mm"])
def test_compiles_whole_and_once_for_any_routing(implementation):
    def step(x, ids, weights, up, down):
        return experts(2 * x, ids, weights, up, down, activation="swiglu", implementation=implementation).square()

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    dtype = torch.float32 if implementation == "cpu" else torch.bfloat16  # PyTorch compiles grouped_mm in bf16 alone
    for case in ("random", "out of range"):
        arguments = inputs(routing(case), "swiglu")
        probe = torch.randn_like(arguments[0]).bfloat16().double()
        expected = results(step, arguments, probe, dtype)
        with torch.compiler.set_stance("default" if case == "random" else "fail_on_recompile"):
            assert_close(results(compiled, arguments, probe, dtype), expected, TOLERANCE[dtype])
