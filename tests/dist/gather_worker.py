"""Under torchrun: a small model of uneven parameters, gathered and reduced by parallel/gather.py, against the same model unsharded."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef

from configs.schema import CompileConfig, ParallelConfig
from model import params
from model.params import P
from parallel import collectives, gather, reduction, sharding
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.exchange_order import order
from tests.dist.first import worst
from tests.dist.launch import leave
from training.engine import Engine, Pass
from training.state import State

LAYERS, WIDTH, HIDDEN = 5, 7, 5  # odd sizes: every shard is uneven and on 3 ranks one is empty


def spec() -> dict[str, Any]:
    layer = {
        "norm": P((3,), ("embed",), "ones"),
        "up": P((HIDDEN, WIDTH), ("ffn", "embed"), std=0.5),
        "down": P((WIDTH, HIDDEN), ("embed", "ffn"), std=0.5),
        "shift": P((1,), ("heads",), "ones"),
    }
    return {"layers": [dict(layer) for _ in range(LAYERS)]}


def layer(w: dict[str, Tensor], x: Tensor, ctx: Any) -> Tensor:
    h = torch.tanh(x @ w["up"].t()) * w["norm"].sum()
    return x + h @ w["down"].t() + w["shift"]


def own_input() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + dist.get_rank())


def run(call: Any, x: Tensor) -> Tensor:
    for i in range(LAYERS):
        x = call((f"layers.{i}",), layer, x)
    return x.square().sum()


def sharded(dtype: torch.dtype, reshard: bool, compile: CompileConfig) -> tuple[Mesh, Engine, dict[str, Tensor]]:
    """Mesh, engine and this rank's shards of the model."""
    mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
    engine = Engine(spec(), ((f"layers.{i}",) for i in range(LAYERS)), mesh, dtype, gather.Reshard(reshard, reshard), compile)
    shards = {name: sharding.shard(p, params.draw(name, p, 0), mesh) for name, p in params.named_leaves(spec())}
    return mesh, engine, {name: w.requires_grad_() for name, w in sharding.local(shards).items()}


def unsharded(ranks: int) -> tuple[float, dict[str, Tensor]]:
    """The losses and gradients of all ranks' inputs added up, in fp64."""
    full = {name: params.draw(name, p, 0).double().requires_grad_() for name, p in params.named_leaves(spec())}
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        x = torch.linspace(-1, 1, 4 * WIDTH).double().view(4, WIDTH) * (1 + rank)
        for i in range(LAYERS):
            x = layer({key: full[f"layers.{i}.{key}"] for key in ("norm", "up", "down", "shift")}, x, None)
        total = total + x.square().sum()
    return total.item(), dict(zip(full, torch.autograd.grad(total, list(full.values())), strict=True))


def errors(mesh: Mesh, loss: Tensor, grads: dict[str, Tensor]) -> dict[str, Any]:
    """Of all ranks' losses together, and the largest of any parameter's gradient, whose shards are given."""
    total = collectives.sum_over_ranks(loss.detach().double().clone()).item()
    reference, expected = unsharded(mesh.world)
    return {"loss_error": abs(total - reference) / reference, "gradient_error": gradient_error(mesh, grads, expected)}


def gradient_error(mesh: Mesh, grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of any parameter, of whose gradient the shards are given."""
    leaf = dict(params.named_leaves(spec()))
    full = {name: sharding.from_local(leaf[name], grad.contiguous(), mesh).full_tensor().double() for name, grad in grads.items()}
    return worst(((full[n] - expected[n]).norm() / expected[n].norm()).item() for n in full)


def measure(reshard: bool, dtype: torch.dtype) -> dict[str, Any]:
    mesh, engine, leaves = sharded(dtype, reshard, CompileConfig(enabled=False))
    live = LiveMeter()
    with CommDebugMode() as comms, live:
        call = Pass(engine, leaves, SimpleNamespace(training=True))
        if dtype != torch.float32:
            call = cast(call, dtype)
        loss = run(call, own_input())
        grads = torch.autograd.grad(loss, list(leaves.values()))
    counts = {str(op).rpartition(".")[2]: n for op, n in comms.get_comm_counts().items()}
    return {**errors(mesh, loss, dict(zip(leaves, grads, strict=True))), "live_max": live.most, "late": live.late, "counts": counts}


def measure_frozen() -> dict[str, Any]:
    """Layers 1 to 3 of 5 are frozen; gradients still travel through them."""
    frozen = params.map_named(lambda path, p: replace(p, trained=path.split(".")[1] not in "123"), spec())
    mesh, _, leaves = sharded(torch.float32, True, CompileConfig(enabled=False))
    engine = Engine(frozen, ((f"layers.{i}",) for i in range(LAYERS)), mesh, torch.float32, gather.Reshard(), CompileConfig(enabled=False))
    trained = {name: w.requires_grad_(p.trained) for (name, p), w in zip(params.named_leaves(frozen), leaves.values(), strict=True)}
    live = LiveMeter()
    with CommDebugMode() as comms, live:
        loss = run(Pass(engine, leaves, SimpleNamespace(training=True)), own_input())
        trained = {name: w for name, w in trained.items() if w.requires_grad}
        grads = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    counts = {str(op).rpartition(".")[2]: n for op, n in comms.get_comm_counts().items()}
    return {**errors(mesh, loss, grads), "live_max": live.most, "counts": counts}


def measure_step_scope() -> dict[str, Any]:
    """compile.scope=step: the whole pass is one graph, its gathers and reductions inside."""
    mesh, engine, leaves = sharded(torch.float32, True, CompileConfig(enabled=True, scope="step"))
    context, graphs = SimpleNamespace(training=True), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    @torch.compile(fullgraph=True, dynamic=False, backend=backend)
    def forward(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        return run(Pass(engine, leaves, context), x)

    loss = forward(leaves, own_input())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {**errors(mesh, loss, dict(zip(leaves, grads, strict=True))), "graphs": len(graphs)}


def kept_without_backward() -> int:
    """How many tensors that a forward pass saved are still in memory after its result is gone; tanh saves its own output."""
    mesh, engine, leaves = sharded(torch.float32, True, CompileConfig(enabled=False))
    owned = {w.untyped_storage()._cdata for w in leaves.values()}
    saved: list[StorageWeakRef] = []
    pack = gather.Use._pack

    def noted(use: gather.Use, t: Tensor) -> Any:
        if t.untyped_storage()._cdata not in owned:
            saved.append(StorageWeakRef(t.untyped_storage()))
        return pack(use, t)

    gather.Use._pack = noted  # type: ignore[method-assign,assignment]
    try:
        run(Pass(engine, leaves, SimpleNamespace(training=True)), own_input())
    finally:
        gather.Use._pack = pack  # type: ignore[method-assign]
    assert saved or mesh.world == 1
    return sum(not storage.expired() for storage in saved)


def cast(call: Pass, dtype: torch.dtype) -> Any:
    return lambda key, fn, x: call(key, fn, x.to(dtype))


def gradient_sum_error(dtype: torch.dtype, sums: torch.dtype | None = None, stored: torch.dtype = torch.float32) -> float:
    """Of a gradient whose parts bf16 holds and whose sum it does not: 1 from rank 0, 2^-9 from every other."""
    mesh, p = make_mesh(ParallelConfig(), torch.device("cpu")), P((8,), ("embed",), "ones")
    leaf = sharding.shard(p, torch.ones(8, dtype=stored), mesh)
    shard = State(0, {"w": leaf}, {}, {"w": leaf}, {"w": leaf}).leaves()["w"]
    (whole,) = gather.Use(gather.Unit([p], mesh, dtype, gather.Reshard(False, False), sums=sums), [shard]).weights()
    (grad,) = torch.autograd.grad((whole * (1.0 if mesh.rank == 0 else 2.0**-9)).sum(), shard)
    assert grad.dtype == torch.float32
    return (grad - (1 + (mesh.world - 1) * 2.0**-9)).abs().max().item()


def joined_error(zero_stage: int) -> float:
    """Of what tp splits along either dimension, and of what it does not, put together for passes whose every rank computes all."""
    mesh = make_mesh(ParallelConfig(tp=2, zero_stage=zero_stage), torch.device("cpu"))
    leaves = [P((6, 5), ("vocab", "embed"), std=1.0), P((5, 4), ("embed", "hidden"), std=1.0), P((3, 5), ("ffn", "embed"), std=1.0)]
    full = [params.draw(str(i), p, 0) for i, p in enumerate(leaves)]
    shards = sharding.local({str(i): sharding.shard(p, t, mesh) for i, (p, t) in enumerate(zip(leaves, full, strict=True))})
    whole = gather.Use(gather.Unit(leaves, mesh, torch.float32, gather.Reshard(), together=True), list(shards.values())).weights()
    assert [t.shape for t in whole] == [t.shape for t in full]
    return max((t - expected).abs().max().item() for t, expected in zip(whole, full, strict=True))


def measure_reductions() -> dict[str, Any]:
    """The last unit has the parameters of the first too; what a reduction writes is there when it is waited for and not before. Two rows,
    of which the second adds to what the first gave."""
    mesh, _, leaves = sharded(torch.float32, True, CompileConfig(enabled=False))
    keys = [*((f"layers.{i}",) for i in range(LAYERS - 1)), (f"layers.{LAYERS - 1}", "layers.0")]
    engine = Engine(spec(), keys, mesh, torch.float32, gather.Reshard(), CompileConfig(enabled=False))
    events: list[str] = []
    sums: dict[int, Tensor] = {}

    def start(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        events.append("start")
        begun = collectives.reduce_scatter_start(x, group)
        sums[begun.untyped_storage()._cdata] = collectives.wait(begun).clone()
        return begun.fill_(torch.nan)

    def wait(x: Tensor) -> None:
        events.append("wait")
        x.copy_(sums.pop(x.untyped_storage()._cdata))

    with mock.patch.object(reduction, "reduce_scatter_start", start), mock.patch.object(reduction, "wait", wait):
        shared, total, given = gather.Shared(), torch.zeros((), dtype=torch.float64), []
        for row in range(2):
            call, x = Pass(engine, leaves, SimpleNamespace(training=True), shared), own_input() / (1 + row)
            for key in keys:
                x = call(key, both if len(key) > 1 else layer, x)
                x.register_hook(lambda grad: events.append("layer"))
            grads = torch.autograd.grad(x.square().sum(), list(leaves.values()), allow_unused=True)
            given.append(sum(grad is not None for grad in grads))
            shared.sums |= {leaf: grad for leaf, grad in zip(leaves.values(), grads, strict=True) if grad is not None}
    full = {name: params.draw(name, p, 0).double().requires_grad_() for name, p in params.named_leaves(spec())}
    for rank, row in product(range(mesh.world), range(2)):
        x = torch.linspace(-1, 1, 4 * WIDTH).double().view(4, WIDTH) * (1 + rank) / (1 + row)
        for i in [*range(LAYERS - 1), LAYERS - 1, 0]:
            x = layer({key: full[f"layers.{i}.{key}"] for key in ("norm", "up", "down", "shift")}, x, None)
        total = total + x.square().sum()
    expected = dict(zip(full, torch.autograd.grad(total, list(full.values())), strict=True))
    found = {name: shared.sums[leaf] for name, leaf in leaves.items()}
    return {"gradient_error": gradient_error(mesh, found, expected), "events": events, "left": len(sums), "given": given}


def both(w: dict[str, dict[str, Tensor]], x: Tensor, ctx: Any) -> Tensor:
    return layer(w["0"], layer(w[str(LAYERS - 1)], x, ctx), ctx)


class LiveMeter:
    """The largest number of uses whose gathered weights were in memory at once, by their storages; and how many units that gather again
    still had them when their gradients were reduced."""

    def __enter__(self) -> "LiveMeter":
        self.uses: set[gather.Use] = set()
        self.most = self.late = 0
        self.originals = gather.Use.start, gather.Use.finish, gather.Unit.reduce_start

        def start(use: gather.Use) -> None:
            self.originals[0](use)
            self.count(use)

        def finish(use: gather.Use) -> list[Tensor | None]:
            whole = self.originals[1](use)
            self.count(use)
            return whole

        def reduce_start(unit: gather.Unit, grads: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> Any:
            self.late += unit.reshard and any(use.live for use in self.uses if use.unit is unit)
            return self.originals[2](unit, grads, sums)

        gather.Use.start, gather.Use.finish, gather.Unit.reduce_start = start, finish, reduce_start  # type: ignore[method-assign,assignment]
        return self

    def count(self, use: gather.Use) -> None:
        self.uses.add(use)
        self.most = max(self.most, sum(u.live for u in self.uses))

    def __exit__(self, *exc: object) -> None:
        gather.Use.start, gather.Use.finish, gather.Unit.reduce_start = self.originals  # type: ignore[method-assign]


if __name__ == "__main__":
    start_processes(torch.device("cpu"))
    results: dict[str, Any] = {f"{'reshard' if reshard else 'keep'}_{name}": measure(reshard, dtype)
               for reshard in (True, False) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    rank, cpu = dist.get_rank(), torch.device("cpu")
    flags = {
        "any": collectives.any_rank(rank == 0, cpu), "none": collectives.any_rank(False, cpu, collectives.host_group()),
        "every": collectives.every_rank(True, cpu), "not_every": collectives.every_rank(rank == 0, cpu),
        "objects": collectives.gather_objects(rank), "first": collectives.gather_objects(collectives.from_first_rank(f"rank {rank}")),
    }
    results |= {"flags": flags, "step_scope": measure_step_scope(), "frozen": measure_frozen(), "kept": kept_without_backward(),
                "gradient_sum_error": gradient_sum_error(torch.bfloat16),
                "rounded_sum_error": gradient_sum_error(torch.bfloat16, torch.bfloat16),
                "narrow_sum_error": gradient_sum_error(torch.bfloat16, stored=torch.bfloat16)}
    if dist.get_world_size() == 2:
        results["reductions"] = measure_reductions()
        results["joined_errors"] = [joined_error(zero_stage) for zero_stage in (0, 3)]
        results["orders"] = {f"{dispatch}, {policy}": order(dispatch, policy)
                             for dispatch, policy in (("allgather", "none"), ("allgather", "selective"), ("alltoall", "none"))}
    leave(results)
