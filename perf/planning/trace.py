"""One training step of one rank on fake tensors, over a process group that sends nothing: the trainer's own code, whose memory, work and
collectives are written down.

Layers are compiled by the same front end as in a run, once for each kind, and cut into forward and backward as there; the graphs then
stand for the kernels. What the trainer does between graphs (gathering, reducing, updating) is followed operator by operator.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from configs.schema import Config
from data.packing import pack_row
from kernels import launch, linear_cross_entropy
from model import params
from model.context import Context
from model.stages import own_spec
from parallel import expert, gather, mesh, sharding
from parallel.mesh import Mesh, make_mesh
from perf.planning.costs import Load, tensor_bytes
from perf.planning.graphs import analyse, outcome
from perf.planning.meter import HOST, Event, Meter, Sent, Taken, Trace
from training import engine, halves, recompute
from training import step as training_step
from training.engine import Engine
from training.pipeline import Transfers
from training.state import State, init_state
from training.step import DTYPES, make_engine, make_step, master_dtype, moment_dtype, offload_of

BLOCK_BYTES = 512  # in which a GPU's memory is given out


class Messages(Transfers):
    """Writes down what passes between the ranks of a pipeline."""

    def __init__(self, events: list[Event], *args: Any):
        super().__init__(*args)
        self.events, self.numbers = events, Counter[int]()

    def send(self, x_TD: Tensor, stage: int) -> None:
        self.events.append(Sent(self.places[stage], tensor_bytes(x_TD)))
        super().send(x_TD, stage)

    def receive(self, tokens: int, stage: int) -> Callable[[], Tensor]:
        source, arrived = self.places[stage], super().receive(tokens, stage)
        number = self.numbers[source]
        self.numbers[source] += 1

        def taken() -> Tensor:
            x_TD = arrived()
            self.events.append(Taken(source, number, tensor_bytes(x_TD)))
            return x_TD

        return taken


class Layers:
    """Takes the place of Engine.function: compiled functions whose graphs are analysed once and then stand for their kernels.

    :param halved: backward comes in halves
    """

    def __init__(self, meter: Meter, load: Load, halved: bool):
        self.meter, self.load, self.halved = meter, load, halved
        self.known: dict[Any, Callable[..., Any]] = {}

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, compiled for each new combination of shapes."""
        return functools.partial(self._call, fn)

    def _call(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        *inputs, context = arguments
        boundaries: dict[str, Any] = {f.name: v for f in dataclasses.fields(context) if isinstance(v := getattr(context, f.name), Tensor)}
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tree_leaves((inputs, boundaries)) if isinstance(t, Tensor))
        name = f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"
        if (name, shapes) not in self.known:
            self.known[name, shapes] = self._compiled(name, fn, context)
        return self.known[name, shapes](inputs, boundaries)

    def _compiled(self, name: str, fn: Callable[..., Any], context: Context) -> Callable[..., Any]:
        def flat(inputs: list[Any], boundaries: dict[str, Any]) -> Any:
            return fn(*inputs, dataclasses.replace(context, **boundaries))

        later: list[bool] = []  # which of what it takes are weights

        def backward(gm: Any, example_inputs: Any) -> Any:
            if not self.halved:
                return self._graph(f"{name}, backward", gm, example_inputs)
            names = iter(("inputs", "weights"))
            return halves.halved(gm, example_inputs, later, (),
                                 lambda part, inputs, _: self._graph(f"{name}, backward: {next(names)}", part, inputs))

        whole = aot_function(
            flat, fw_compiler=functools.partial(self._graph, f"{name}, forward"),
            bw_compiler=backward,
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"), decompositions=select_decomp_table())
        made = False

        def call(inputs: list[Any], boundaries: dict[str, Any]) -> Any:
            nonlocal made
            if not made:  # tracing runs inside the first call, and its graphs keep what it was called with
                later[:] = [True] * len(tree_leaves(inputs[0])) + [False] * len(tree_leaves((inputs[1:], boundaries)))
                with self.meter.unobserved():
                    whole(*tree_map_only(Tensor, _apart, (inputs, boundaries)))
                made = True
            return whole(inputs, boundaries)

        return call

    def _graph(self, name: str, graph: Any, inputs: Any) -> Any:
        analysed = self.meter.trace.graphs[name] = analyse(name, graph, self.load)
        made = outcome(graph)

        def run(*args: Any) -> Any:
            with self.meter.unobserved():
                out = made(args)
            if self.meter.silent:
                return out
            self.meter.note(analysed.transient_bytes)
            self.meter.trace.events.append(analysed)
            with self.meter.within("activations" if name.endswith("forward") else "gradients on their way"):
                self.meter.hold([t for t in tree_leaves(out) if isinstance(t, Tensor)])
            return out

        return make_boxed_func(run)


def _apart(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)


def trace_step(cfg: Config, world: int, gpu: bool, memory_bytes: float, load: Load, rank: int = 0,
               limit_bytes: float = math.inf) -> Trace:
    """What rank `rank` of `world` does in a step, with the kernels of a GPU or of a CPU, and so much memory.

    Tensors say that they are on a CPU either way: a torch without CUDA cannot index even fake ones elsewhere.
    """
    trace = Trace()
    with ExitStack() as stack:
        stack.enter_context(processes(world, rank))
        stack.enter_context(replaced(cfg, gpu, memory_bytes, load))
        places = make_mesh(cfg.parallel, torch.device("cpu"))
        trace.groups = axes(places)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        state = empty_state(cfg, places)
        static = make_engine(cfg, places)
        packed = {name: torch.from_numpy(value) for name, value in pack_row([], cfg.data.rows[-1]).items()}
        row = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in packed.items()}
        with Meter(trace, load, BLOCK_BYTES if gpu else 1, limit_bytes) as meter:
            follow(meter, state, static, cfg)
            stack.enter_context(mock.patch.object(training_step, "row_loss", _measured(meter, training_step.row_loss)))
            stack.enter_context(mock.patch.object(training_step, "Transfers", functools.partial(Messages, trace.events)))
            for module in (gather, training_step):
                stack.enter_context(mock.patch.object(module, "to_host", meter.to_host))
            make_step(cfg, places, static)(state, [row] * cfg.train.accumulate)
    return trace


@contextmanager
def processes(world: int, rank: int = 0) -> Iterator[None]:
    """This process as one of so many that send each other nothing; there can be one set of processes at a time."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def replaced(cfg: Config, gpu: bool, memory_bytes: float, load: Load) -> Iterator[None]:
    """What asks a device or other ranks for a value gets the answer that is planned with."""
    with ExitStack() as stack:
        for module, name, instead in (
                (mesh, "_group_of", own_group), (expert, "plan", exchange(cfg, load)),
                (training_step, "memory_bytes", lambda device: memory_bytes), (training_step, "every_rank", lambda flag, device: flag),
                (training_step, "gather_objects", lambda value, group: [{"loss": torch.Size()} | value])):  # the last stage's loss
            stack.enter_context(mock.patch.object(module, name, instead))
        if cfg.compile.enabled:
            stack.enter_context(mock.patch.object(engine, "recomputed", _marked))
        if gpu:
            stack.enter_context(mock.patch.object(launch, "serves", lambda t, implementations: "triton" in implementations))
            losses = linear_cross_entropy.IMPLEMENTATIONS
            stack.enter_context(mock.patch.dict(losses, {"chunked": losses["triton"]}))
        yield


def own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """This rank's group, without those of the others; None of those for the host, which sends nothing between devices."""
    own = next((ranks for ranks in groups if dist.get_rank() in ranks), None)
    return None if own is None or backend is not None else dist.new_group(own)


def exchange(cfg: Config, load: Load) -> Callable[..., expert.Plan]:
    """The exchange of tokens of the fullest rank, whose own tokens choose evenly."""
    def plan(ids_TK: Tensor, n_local: int, group: Any) -> expert.Plan:
        tokens, ranks = len(ids_TK), group.size()
        rows = tokens * load.fill * meeting(cfg.model.decoder.n_experts, cfg.model.decoder.top_k, ranks)
        sent, received = round(rows), round(min(tokens * load.fill, rows * load.imbalance))
        return expert.Plan(ids_TK.new_zeros(sent * ranks), ids_TK.new_zeros(tokens, ranks), [sent] * ranks, [received] * ranks)

    return plan


def meeting(n_experts: int, top_k: int, ranks: int) -> float:
    """How likely one of a token's experts is on a given rank."""
    return 1 - math.comb(n_experts - n_experts // ranks, top_k) / math.comb(n_experts, top_k)


def axes(places: Mesh) -> dict[str, tuple[str, list[int]]]:
    """What each process group is for, all of it where axes have the same ranks, and its ranks."""
    named = {"tp": places.tp_group, "cp": places.cp_group, "ep": places.ep_group, "cp and tp": places.split_group,
             "pp": places.pp_group if places.sizes.pp > 1 else None, "ends of pp": places.ends_group,
             "stage": places.stage_group}
    for view, label in ((places.dense, "shards"), (places.tensor, "shards of tp"), (places.experts, "shards of experts")):
        if view is not None:
            named |= {label: view.get_group("shard"), f"copies of {label}": view.get_group("replicate")}
    found: dict[str, tuple[str, list[int]]] = {}
    for name, group in (named | {"dp": places.dp_group, "world": dist.group.WORLD}).items():
        if group is not None:
            before = found.get(group.group_name, ("", []))[0]
            found[group.group_name] = f"{before}, {name}" if before else name, dist.get_process_group_ranks(group)
    return found


def empty_state(cfg: Config, places: Mesh) -> State:
    """A state of the right shapes, through the trainer's own function."""
    spec, dtype = own_spec(cfg, places.pp_rank), master_dtype(cfg)

    def part(p: params.P) -> Any:
        if p.kind == "buffer":
            return torch.empty(p.shape, device=places.device)
        return sharding.from_local(p, torch.empty([n for _, n in sharding.local_box(p, places)], dtype=dtype, device=places.device), places)

    state = init_state(spec, cfg.seed, places, dtype, {name: part(p) for name, p in params.named_leaves(spec)}, offload_of(cfg),
                       DTYPES[cfg.precision], moment_dtype(cfg))
    if offload_of(cfg) != "optimizer":
        return state
    # of their own also where they are as wide as the parameters, which are elsewhere
    return dataclasses.replace(state, copies={name: torch.empty_like(copy) for name, copy in state.copies.items()})


def follow(meter: Meter, state: State, static: Engine, cfg: Config) -> None:
    """Counts the state, and makes the trainer's own parts say what their memory is for."""
    away = offload_of(cfg) != "none"
    with meter.within("parameters" if offload_of(cfg) == "optimizer" else HOST):
        meter.hold(list(state.copies.values()))
    for purpose, tensors in (("parameters", state.params), ("moments", state.first), ("moments", state.second)):
        with meter.within(HOST if away else purpose):
            meter.hold(list(sharding.local(tensors).values()))
    with meter.within("buffers"):
        meter.hold(list(state.buffers.values()))
    meter.trace.state, meter.trace.host_state_bytes = meter.device, meter.live[HOST]
    if cfg.compile.enabled:
        static.function = Layers(meter, meter.load, static.halved).function  # type: ignore[method-assign]
    for unit in {id(u): u for u in (*static.units.values(), *static.joined.values())}.values():
        for name in ("start", "finish"):
            setattr(unit, name, _within(meter, "gathered weights", (name, *unit.groups), getattr(unit, name)))
        unit.reduce_start = _within(meter, "gradients", None, unit.reduce_start)  # type: ignore[method-assign]


@functools.cache
def _marked(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Stands for training.recompute.recomputed: marks what a layer computes as the compiler's front end does, for the partitioner."""
    def run(w: Any, *inputs: Any) -> Any:
        marks, _ = create_selective_checkpoint_contexts(functools.partial(recompute._decide, policy))
        marks.ac_graph_id = 0
        with fx_traceback.preserve_node_meta(), marks:
            return fn(w, *inputs)

    return functools.wraps(fn)(run)


def _measured(meter: Meter, loss: Callable[..., Any]) -> Callable[..., Any]:
    begun: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        begun.append(meter.device_bytes)
        out = loss(*args, **kwargs)
        meter.trace.forward_bytes = max(meter.trace.forward_bytes, meter.device_bytes - begun[0])
        return out

    return call


def _within(meter: Meter, purpose: str, key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    """`key`: of calls that do the same; None where each must run, since it returns more than tensors."""
    def call(*args: Any) -> Any:
        with meter.within(purpose):
            if key is None:
                return function(*args)
            return meter.repeated(key, lambda: function(*args), tree_leaves(args))

    return call
