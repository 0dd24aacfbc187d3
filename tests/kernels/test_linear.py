"""The dense product against its definition, forward and gradients, by both libraries, and how the library is chosen."""

import pytest
import torch
from torch import Tensor

from kernels import linear as module
from kernels.linear import ENVIRONMENT, IMPLEMENTATIONS, LIBRARIES, linear, product, product_nt

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def error(value: Tensor, reference: Tensor) -> float:
    return float(((value.double() - reference.double()).norm() / reference.double().norm()).detach())


def results(x: Tensor, w: Tensor, bias: Tensor | None, probe: Tensor, dtype: torch.dtype, implementation: str) -> list[Tensor]:
    """Output and gradients in `dtype`."""
    leaves = [t.to(dtype).detach().clone().requires_grad_() for t in (x, w, bias) if t is not None]
    y = linear(leaves[0], leaves[1], leaves[2] if bias is not None else None, implementation)
    return [y, *torch.autograd.grad((y * probe.to(dtype)).sum(), leaves)]


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
@pytest.mark.parametrize("shape", [(37,), (3, 5), (1,)], ids=str)
def test_matches_the_definition(monkeypatch, shape, implementation, dtype, library):
    monkeypatch.setenv(ENVIRONMENT, library)
    x, w = torch.randn(*shape, 24, dtype=torch.float64), torch.randn(40, 24, dtype=torch.float64)
    bias, probe = torch.randn(40, dtype=torch.float64), torch.randn(*shape, 40, dtype=torch.float64)
    for b in (bias, None):
        y = (x[..., None, :] * w).sum(-1)
        flat, flat_probe = x.flatten(0, -2), probe.flatten(0, -2)
        expected = [y if b is None else y + b, (flat_probe @ w).view_as(x), flat_probe.T @ flat, flat_probe.sum(0)]
        got = results(x, w, b, probe, dtype, implementation)
        assert len(got) == (3 if b is None else 4)
        for value, reference in zip(got, expected, strict=False):
            assert value.shape == reference.shape
            assert value.dtype == dtype
            assert error(value, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_no_rows(monkeypatch, library):
    monkeypatch.setenv(ENVIRONMENT, library)
    x, w = torch.randn(0, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    y = linear(x, w)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == (0, 6)
    assert dx.shape == (0, 8)
    assert torch.equal(dw, torch.zeros(6, 8))


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_strided_operands(monkeypatch, library):
    monkeypatch.setenv(ENVIRONMENT, library)
    shapes = {"nt": ((12, 8), (20, 8)), "nn": ((12, 20), (20, 8)), "tn": ((12, 20), (12, 8))}
    for kind, (a_shape, b_shape) in shapes.items():
        a, b = torch.randn(*reversed(a_shape)).t(), torch.randn(b_shape[0], 2 * b_shape[1])[:, ::2]
        expected = {"nt": lambda a, b: a @ b.T, "nn": lambda a, b: a @ b, "tn": lambda a, b: a.T @ b}[kind](a.double(), b.double())
        assert error(product(kind, a, b), expected) < 1e-6
        out = torch.empty_like(expected, dtype=torch.float32)
        assert product(kind, a, b, out=out) is out
        assert error(out, expected) < 1e-6
        assert product(kind, a, b, out=out, add=True) is out
        assert error(out, 2 * expected) < 1e-6
    wide = torch.ones(12, 20)
    product("nt", torch.ones(12, 8).bfloat16(), torch.full((20, 8), 0.5).bfloat16(), out=wide, add=True)
    assert torch.equal(wide, torch.full((12, 20), 5.0))


def test_operators_pass_opcheck(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "onednn")
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    torch.library.opcheck(product_nt, (x, w))
    torch.library.opcheck(module.product_nn, (torch.randn(5, 6), w.detach()))
    torch.library.opcheck(module.product_tn, (torch.randn(5, 6), x.detach()))


def test_gradients_that_nobody_asked_for_are_not_computed(monkeypatch):
    asked = []

    def library(kind):
        asked.append(kind)
        return "mkl"

    monkeypatch.setattr(module, "library", library)
    x, w = torch.randn(5, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, w).sum().backward()
    assert asked == ["nt", "tn"]


def test_the_faster_library_is_measured_once(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    calls = dict.fromkeys(("mkl", "onednn"), 0)
    clock = [0.0]

    def timed(name, seconds):
        def run(a, b, out):
            calls[name] += 1
            clock[0] += seconds
            return a @ b
        return run

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    for seconds, winner in (((1.0, 0.5), "onednn"), ((0.5, 1.0), "mkl"), ((1.0, 0.99), "mkl")):
        module._measured_library.cache_clear()
        for name, s in zip(calls, seconds, strict=True):
            monkeypatch.setitem(LIBRARIES, name, timed(name, s))
        before = dict(calls)
        assert [module.library("nt") for _ in range(3)] == [winner] * 3
        assert {name: calls[name] - before[name] for name in calls} == dict.fromkeys(calls, module.ROUNDS)
    module._measured_library.cache_clear()


def test_the_environment_overrides_the_measurement(monkeypatch):
    monkeypatch.setattr(module, "_measured_library", None)
    for name in ("mkl", "onednn"):
        monkeypatch.setenv(ENVIRONMENT, name)
        assert module.library("tn") == name


def test_another_process_choice_is_taken_over(monkeypatch):
    """A resumed run multiplies as the one that wrote its checkpoint, whatever is faster now; the environment still wins."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(module, "_measured_library", lambda kind: "mkl")
    monkeypatch.setattr(module, "_chosen", {})
    module.use_libraries({"nn": "onednn"})
    assert module.libraries() == {"nt": "mkl", "nn": "onednn", "tn": "mkl"}
    monkeypatch.setenv(ENVIRONMENT, "mkl")
    assert module.libraries() == dict.fromkeys(("nt", "nn", "tn"), "mkl")
