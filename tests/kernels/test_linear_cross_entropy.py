"""Fused head and loss: against F.cross_entropy and the definition of every option, gradients, ignored rows, blocks."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import ENVIRONMENT, product
from kernels.linear_cross_entropy import cpu as module
from kernels.linear_cross_entropy import linear_cross_entropy

T, D, V = 75, 16, 41
ON_CPU, FAST = ["reference", "chunked"], ["chunked"]  # tests/interpreter tests "triton"
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"label_smoothing": 0.2}, id="label smoothing"),
    pytest.param({"z_loss": 0.3}, id="z-loss"),
    pytest.param({"soft_cap": 1.5}, id="soft cap"),
    pytest.param({"label_smoothing": 0.1, "z_loss": 0.05, "soft_cap": 2.0, "ignore_index": 3}, id="all"),
]


def inputs(ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """h, weight (of values that bf16 holds exactly) in fp64, and labels of which a third is ignored."""
    h, weight = torch.randn(T, D).bfloat16().double(), (0.5 * torch.randn(V, D)).bfloat16().double()
    labels = torch.randint(0, V, (T,))
    return h, weight, torch.where(torch.rand(T) < 0.3, ignore_index, labels)


def results(h: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, upstream: float = 0.37, function=linear_cross_entropy,
            **options) -> dict[str, Tensor]:
    h, weight = (t.to(dtype).detach().clone().requires_grad_() for t in (h, weight))
    loss, count = function(h, weight, labels, **options)
    dh, dweight = torch.autograd.grad(loss * upstream, (h, weight))
    return {"loss": loss.detach(), "count": count, "h": dh, "weight": dweight}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got["count"].dtype == torch.int64
    assert int(got["count"]) == int(expected["count"])
    for name in ("loss", "h", "weight"):
        value, reference = got[name].double(), expected[name].double()
        assert value.shape == reference.shape, name
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), name


def definition(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
               soft_cap: float | None = None) -> tuple[Tensor, Tensor]:
    """A loop over the labelled rows; the cross-entropy is PyTorch's."""
    rows = [t for t, label in enumerate(labels.tolist()) if label != ignore_index]
    loss = h.new_zeros(())
    for t in rows:
        z = weight @ h[t]
        if soft_cap is not None:
            z = soft_cap * (1 - 2 / (torch.exp(2 * z / soft_cap) + 1))
        loss = loss + F.cross_entropy(z[None], labels[t][None], label_smoothing=label_smoothing) + z_loss * torch.log(z.exp().sum()) ** 2
    return loss, torch.tensor(len(rows))


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_is_the_definition(options):
    arguments = inputs(options.get("ignore_index", -100))
    expected = results(*arguments, torch.float64, function=definition, **options)
    assert_close(results(*arguments, torch.float64, implementation="reference", **options), expected, 1e-13)


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("options", OPTIONS)
def test_fast_versions_match_the_reference(monkeypatch, options, implementation, dtype, library):
    monkeypatch.setenv(ENVIRONMENT, library)
    arguments = inputs(options.get("ignore_index", -100))
    expected = results(*arguments, torch.float64, implementation="reference", **options)
    got = results(*arguments, dtype, implementation=implementation, chunk=20, **options)
    assert_close(got, expected, TOLERANCE[dtype])
    assert got["loss"].dtype == torch.promote_types(dtype, torch.float32)
    assert got["h"].dtype == got["weight"].dtype == dtype


def test_library():
    """PyTorch's own loss where it has the options, and a refusal where it has not."""
    arguments = inputs(ignore_index=3)
    options: dict[str, Any] = {"label_smoothing": 0.2, "ignore_index": 3}
    expected = results(*arguments, torch.float64, implementation="reference", **options)
    assert_close(results(*arguments, torch.float64, implementation="torch", **options), expected, 1e-13)
    with pytest.raises(NotImplementedError):
        linear_cross_entropy(*arguments, implementation="torch", z_loss=0.1)
    with pytest.raises(NotImplementedError):
        linear_cross_entropy(*arguments, implementation="torch", soft_cap=1.0)


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, T - 1, T, 1000])
def test_any_size_of_block(chunk):
    arguments = inputs()
    expected = results(*arguments, torch.float64, implementation="reference")
    assert_close(results(*arguments, torch.float64, chunk=chunk), expected, 1e-13)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_rows_of_blocks(monkeypatch, ignore_index):
    """No product sees more rows than a block's, and on a CPU none sees the unlabelled ones, however many there are."""
    seen: list[int] = []

    def counted(kind: str, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        if kind == "nt":
            seen.append(len(a))
        return product(kind, a, b, **options)

    monkeypatch.setattr(module, "product", counted)
    h, weight, _ = inputs()
    labels = torch.full((T,), ignore_index).index_fill(0, torch.arange(1, T, 2), 5)
    got = results(h, weight, labels, torch.float32, chunk=32, ignore_index=ignore_index)
    assert int(got["count"]) == 37
    assert seen == [32, 32]


@pytest.mark.parametrize("label", [-1, V])
def test_labels_outside_the_vocabulary_are_refused(label):
    h, weight, labels = inputs()
    labels[3] = label
    with pytest.raises(IndexError, match=f"^label {label} is outside the vocabulary of {V} tokens"):
        results(h, weight, labels, torch.float32)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("rows", [0, 1, T])
def test_no_labels(implementation, rows):
    h, weight, labels = inputs()
    got = results(h[:rows], weight, torch.full_like(labels[:rows], -100), torch.float32, implementation=implementation, z_loss=0.1)
    assert got["h"].shape == (rows, D)
    assert not any(value.any() for value in got.values())


@pytest.mark.parametrize("implementation", ON_CPU)
def test_every_label_of_the_vocabulary(implementation):
    """Loss of equal logits is log V each, for the first and for the last entry too."""
    h, labels = torch.zeros(V, D), torch.arange(V)
    loss, count = linear_cross_entropy(h, torch.randn(V, D), labels, implementation=implementation)
    assert int(count) == V
    torch.testing.assert_close(loss, torch.tensor(V * math.log(V)))


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_confident_predictions(implementation, scale):
    """One logit is larger by 2 scale than the others: right guesses cost nothing, wrong ones 2 scale; nothing overflows."""
    weight = torch.eye(V) * scale
    h = torch.eye(V)[:5] * 2
    labels = torch.tensor([0, 1, 2, 4, 3])
    got = results(h, weight, labels, torch.float32, implementation=implementation)
    expected = results(h, weight, labels, torch.float64, function=definition) if scale < 100 else None
    torch.testing.assert_close(got["loss"], torch.tensor(4 * scale))
    assert all(value.isfinite().all() for value in got.values())
    if expected:
        assert_close(got, expected, 2e-6)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_every_option_changes_the_result(implementation):
    h, weight, labels = inputs(ignore_index=3)
    labels[labels == 3] = 4
    labels[0] = 3
    base = results(h, weight, labels, torch.float64, implementation=implementation)
    for options in ({"ignore_index": 3}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"soft_cap": 3.0}):
        got = results(h, weight, labels, torch.float64, implementation=implementation, **options)
        for name in ("loss", "h", "weight"):
            assert float((got[name] - base[name]).norm()) > 1e-3 * float(base[name].norm()), (options, name)


@pytest.mark.parametrize("implementation", FAST)
def test_an_unlabelled_row_spoils_nothing(implementation):
    h, weight, labels = inputs()
    clean = results(h, weight, labels, torch.float32, implementation=implementation)
    h[labels == -100] = float("nan")
    got = results(h, weight, labels, torch.float32, implementation=implementation)
    assert all(torch.equal(got[name], clean[name]) for name in clean)


@pytest.mark.parametrize("implementation", FAST)
def test_gradient_of_one_input_alone(monkeypatch, implementation):
    """Products that nobody needs are left out."""
    h, weight, labels = inputs()
    kinds: set[str] = set()

    def recorded(kind: str, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        kinds.add(kind)
        return product(kind, a, b, **options)

    monkeypatch.setattr(module, "product", recorded)
    both = results(h, weight, labels, torch.float64, implementation=implementation)
    for name in ("h", "weight"):
        leaves = {"h": h.detach().clone(), "weight": weight.detach().clone()}
        leaves[name].requires_grad_()
        kinds.clear()
        loss, _ = linear_cross_entropy(leaves["h"], leaves["weight"], labels, implementation=implementation)
        assert torch.equal(torch.autograd.grad(loss * 0.37, leaves[name])[0], both[name])
        assert kinds == {"nt", "nn" if name == "h" else "tn"}
    kinds.clear()
    with torch.no_grad():
        loss, count = linear_cross_entropy(leaves["h"], leaves["weight"], labels, implementation=implementation)
    assert not loss.requires_grad
    assert kinds == {"nt"}
    assert torch.equal(loss, both["loss"])
    assert torch.equal(count, both["count"])


def test_inputs_with_strides():
    h, weight, labels = inputs()
    expected = results(h, weight, labels, torch.float64)
    h, weight = (torch.stack((t.T, -t.T))[0].T for t in (h, weight))
    strided = torch.stack((labels, labels), 1)[:, 0]
    loss, count = linear_cross_entropy(h.requires_grad_(), weight.requires_grad_(), strided)
    dh, dweight = torch.autograd.grad(loss * 0.37, (h, weight))
    assert_close({"loss": loss.detach(), "count": count, "h": dh, "weight": dweight}, expected, 1e-13)


class LigerFusedLinearCrossEntropyLoss:
    """What Liger's documentation says."""

    def __init__(self, *, ignore_index: int, lse_square_scale: float, label_smoothing: float, reduction: str, softcap: float | None):
        assert reduction == "sum"
        self.options: dict[str, Any] = {"ignore_index": ignore_index, "z_loss": lse_square_scale, "label_smoothing": label_smoothing,
                                        "soft_cap": softcap}

    def __call__(self, weight: Tensor, h: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(h, weight, labels, implementation="reference", **self.options)[0]


@pytest.mark.parametrize("options", OPTIONS)
def test_arguments_of_liger(monkeypatch, options):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.fused_linear_cross_entropy",
                        SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerFusedLinearCrossEntropyLoss))
    h, weight, labels = inputs(options.get("ignore_index", -100))
    theirs, ours = (results(h, weight, labels, torch.float64, implementation=name, **options) for name in ("liger", "reference"))
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_operator_passes_opcheck():
    h, weight, labels = inputs()
    for h_grad, weight_grad in ((True, True), (False, True), (False, False)):
        arguments = h.float().requires_grad_(h_grad), weight.float().requires_grad_(weight_grad), labels
        torch.library.opcheck(module._loss_op, (*arguments, 32, -100, 0.1, 0.1, 2.0, h_grad, weight_grad))


def test_compiles_whole_and_once_for_any_number_of_labels():
    def step(h, weight, labels):
        loss, count = linear_cross_entropy(2 * h, weight, labels, chunk=32, z_loss=0.1)
        return 3 * loss, count

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for first in (True, False):
        h, weight, labels = inputs()
        expected = results(h, weight, labels, torch.float32, function=step)
        with torch.compiler.set_stance("default" if first else "fail_on_recompile"):
            assert_close(results(h, weight, labels, torch.float32, function=compiled), expected, 1e-6)
