"""What is left in memory of a unit that has run, and what comes to it again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from configs.schema import CompileConfig, ParallelConfig
from model import params
from model.params import P
from parallel.gather import Reshard, Unit
from parallel.mesh import make_mesh, start_processes
from parallel.pipeline import Stage
from training.engine import Engine, Pass
from training.pipeline import Part, StepWork


@pytest.mark.parametrize("training", [True, False])
def test_activations_stay_for_backward_alone(training: bool) -> None:
    """What each layer saves for a backward pass is there as long as the result is, and in evaluation gone with the layer."""
    start_processes(torch.device("cpu"))
    spec = {"layers": [{"w": P((4, 4), ("ffn", "embed"))} for _ in range(3)]}
    keys, mesh = [(f"layers.{i}",) for i in range(3)], make_mesh(ParallelConfig(), torch.device("cpu"))
    engine = Engine(spec, iter(keys), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(params.init(spec, 0))}
    saved: list[StorageWeakRef] = []

    def layer(w: dict[str, Tensor], x: Tensor, ctx: Any) -> Tensor:
        h = torch.tanh(x @ w["w"])  # whose backward reads h
        saved.append(StorageWeakRef(h.untyped_storage()))
        return x + h.sum()

    run, x = Pass(engine, leaves, SimpleNamespace(training=training)), torch.ones(2, 4)
    for key in keys:
        x = run(key, layer, x)
    assert x.requires_grad
    assert [not storage.expired() for storage in saved] == [training] * 3


def test_two_layer_norms_learn_in_16_bits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused side by side, the loops of their backward read sums that they have not written, where columns are contiguous."""
    start_processes(torch.device("cpu"))
    width, rows, guards, name = 64, 256, torch._C._dynamo.guards, "_empty_strided_cpu"
    allocate = getattr(guards, name)

    def poisoned(*args: Any) -> Tensor:
        return allocate(*args).fill_(float("nan"))

    def layer(w: dict[str, Tensor], x: Tensor, ctx: Any) -> Tensor:
        for norm, matrix in ((w["first"], w["a"]), (w["second"], w["b"])):
            x = x + F.linear(F.layer_norm(x.float(), (width,), norm.float()).to(x.dtype), matrix)
        return x

    spec = {"layer": {name: P((width,), ("embed",), "ones") if name in ("first", "second") else P((width, width), ("ffn", "embed"), std=0.1)
                      for name in ("first", "second", "a", "b")}}
    leaves = {name: t.bfloat16().float().requires_grad_() for name, t in params.named_leaves(params.init(spec, 0))}
    x, gradient = (torch.randn(width, rows).bfloat16().float().t() for _ in range(2))
    wanted = [x.requires_grad_(), *leaves.values()]
    expected = torch.autograd.grad(layer({name.removeprefix("layer."): t for name, t in leaves.items()}, x, None), wanted, gradient)
    monkeypatch.setattr(guards, name, poisoned)
    with torch._inductor.config.patch({"cpp.max_horizontal_fusion_size": 16}):
        mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
        engine = Engine(spec, [("layer",)], mesh, torch.bfloat16, Reshard(), CompileConfig())
        run = Pass(engine, leaves, SimpleNamespace(training=True))
        found = torch.autograd.grad(run(("layer",), layer, x.bfloat16()), wanted, gradient.bfloat16())
    for name, e, f in zip(("x", *leaves), expected, found, strict=True):
        assert torch.linalg.vector_norm(f - e) <= 0.01 * torch.linalg.vector_norm(e), name


def test_the_second_half_of_a_backward_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come to a layer for its forward and for the gradients of its input, and not again for those of the weights."""
    start_processes(torch.device("cpu"))
    width, names = 8, [f"layers.{i}" for i in range(3)]
    spec = {"layers": [{"up": P((width, width), ("ffn", "embed"))} for _ in names]}
    mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(params.init(spec, 0))}
    x, dy = torch.randn(4, width, requires_grad=True), torch.randn(4, width)
    started: list[Unit] = []
    start = Unit.start

    def counted(unit: Unit, *arguments: Any) -> Any:
        started.append(unit)
        return start(unit, *arguments)

    monkeypatch.setattr(Unit, "start", counted)

    def layer(w: dict[str, Tensor], x: Tensor, ctx: Any) -> Tensor:
        return x + torch.tanh(x @ w["up"])

    def gradients(halved: bool) -> tuple[list[Tensor], list[int]]:
        engine = Engine(spec, [(name,) for name in names], mesh, torch.float32, Reshard(), CompileConfig(), turns=False, fetched=True,
                        halved=halved)
        started.clear()
        run, y, counts = Pass(engine, leaves, SimpleNamespace(training=True)), x, []
        for name in names:
            y = run((name,), layer, y)
        stage, part = Stage(1, range(3), enters=False, learns_before=True), Part(run, x, y, None)
        work = StepWork([{}], {1: leaves}, run.shared, lambda *_: (part, {}))
        counts.append(len(started))
        if halved:
            dx, rest = work.backward_inputs(stage, part, dy)
            use = run.last
            while use is not None:
                assert not use.live
                use = use.before
            counts.append(len(started))
            rest()
            assert not run.shared.inputs_done  # the next row's layers need their weights
            assert not torch._functorch.config.donated_buffer  # a graph whose backward comes again keeps what it was given
        else:
            dx = work.backward(stage, part, dy)
        assert dx is not None
        return [dx, *work.grads.values()], [*counts, len(started)]

    eager = Engine(spec, [(name,) for name in names], mesh, torch.float32, Reshard(), CompileConfig(enabled=False), halved=True)
    assert not Pass(eager, leaves, SimpleNamespace(training=True)).halved  # its backward is whole
    with torch._functorch.config.patch(donated_buffer=True):  # which is torch's default, and comes back behind this test
        expected, whole = gradients(halved=False)
        found, counts = gradients(halved=True)
    torch.testing.assert_close(found, expected)
    assert whole == [3, 6]
    assert counts == [3, 6, 6]
