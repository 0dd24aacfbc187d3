"""One training step of one rank on fake tensors, over a process group that sends nothing: the trainer's own code, whose memory, work and
collectives are written down.

Layers are compiled by the same front end as in a run, once for each kind, and cut into forward and backward as there; the graphs then
stand for the kernels. What the trainer does between graphs (gathering, reducing, updating) is followed operator by operator.
"""

import dataclasses
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx import traceback as fx_traceback
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from configs.schema import Config
from data.packing import pack_row
from kernels import launch, linear_cross_entropy
from model import params, speech_lm
from model.context import Context
from parallel import expert, mesh, sharding
from parallel.mesh import Mesh, make_mesh
from perf.cases import Work
from perf.planning import costs
from perf.planning.costs import Load, tensor_bytes
from perf.planning.graphs import Graph, Send, analyse, collective, send
from training import engine, recompute
from training import step as training_step
from training.engine import Engine
from training.state import State, init_state
from training.step import make_engine, make_step, master_dtype, moment_dtype

BLOCK_BYTES = 512  # in which a GPU's memory is given out


@dataclass(frozen=True)
class Wait:
    """For the collective whose result lies in this storage."""

    storage: int


@dataclass(frozen=True)
class Begin:
    """A collective whose result will lie in this storage."""

    send: Send
    storage: int


Event = Work | Begin | Wait | Graph


@dataclass
class Trace:
    """What one rank does in a step."""

    events: list[Event] = field(default_factory=list)
    state: Counter[str] = field(default_factory=Counter)  # bytes before the step, by purpose
    forward_bytes: int = 0  # what the forward pass of a row leaves for its backward pass
    at_peak: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # name -> axis and ranks
    graphs: dict[str, Graph] = field(default_factory=dict)


class Meter(TorchDispatchMode):
    """Writes down what is allocated on the device and what happens between graphs."""

    def __init__(self, trace: Trace, load: Load, block_bytes: int):
        super().__init__()
        self.trace, self.load, self.block_bytes = trace, load, block_bytes
        self.live: Counter[str] = Counter()
        self.held: dict[int, tuple[int, str]] = {}
        self.purpose, self.silent = "other", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, AsyncCollectiveTensor) for t in types):
            return NotImplemented  # which asks again, unwrapped
        if "wait_tensor" in str(func) and not self.silent:
            self.trace.events.append(Wait(args[0].untyped_storage()._cdata))
            return args[0]  # as a real one does; a fake one returns new memory
        out = func(*args, **(kwargs or {}))
        if not self.silent:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        kind = collective(func)
        if kind is not None:
            began = send(func, args, kwargs, out, kind)
            storage = next(t for t in tree_leaves((out, args)) if isinstance(t, Tensor)).untyped_storage()._cdata
            self.trace.events.append(Begin(began, storage))
            if "functional" not in str(func):
                self.trace.events.append(Wait(storage))
        elif not func.is_view and tensors:
            values = costs.arguments(func, args, kwargs)
            moved = sum(tensor_bytes([t for t in tree_leaves(v) if isinstance(t, Tensor)]) for v in values.values())
            self.trace.events.append(Work(0.0, float(moved + tensor_bytes(tensors))) if costs.is_pointwise(func) or func.namespace == "aten"
                                     else costs.work(func, args, kwargs, out, self.load))
        self.hold(tensors)

    def hold(self, tensors: list[Tensor]) -> None:
        """New memory is counted until nothing shows it any more."""
        for t in tensors:
            storage = t.untyped_storage()
            key = storage._cdata
            if key in self.held or not storage.nbytes():
                continue
            size = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
            self.held[key] = size, self.purpose
            self.live[self.purpose] += size
            weakref.finalize(storage, self._release, key)
        self.note(0)

    def _release(self, key: int) -> None:
        size, purpose = self.held.pop(key)
        self.live[purpose] -= size

    def note(self, more: int) -> None:
        """Whether this is the most memory so far, with `more` that is given back at once."""
        total = self.live.total() + more
        if total > self.trace.peak_bytes:
            self.trace.peak_bytes = total
            self.trace.at_peak = self.live + Counter({"workspace of a layer": more})

    @contextmanager
    def within(self, purpose: str) -> Iterator[None]:
        """What is allocated here is for this."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """While a graph is made or run, which is written down as a whole."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before


class Layers:
    """Takes the place of Engine.function: compiled functions whose graphs are analysed once and then stand for their kernels."""

    def __init__(self, meter: Meter, load: Load):
        self.meter, self.load = meter, load
        self.known: dict[Any, Callable[..., Any]] = {}

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, compiled for each new combination of shapes."""
        return functools.partial(self._call, fn)

    def _call(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        *inputs, context = arguments
        boundaries: dict[str, Any] = {f.name: v for f in dataclasses.fields(context) if isinstance(v := getattr(context, f.name), Tensor)}
        shapes = tuple((t.shape, t.dtype, t.requires_grad) for t in tree_leaves((inputs, boundaries)) if isinstance(t, Tensor))
        name = f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"
        if (name, shapes) not in self.known:
            self.known[name, shapes] = self._compiled(name, fn, context)
        return self.known[name, shapes](inputs, boundaries)

    def _compiled(self, name: str, fn: Callable[..., Any], context: Context) -> Callable[..., Any]:
        def flat(inputs: list[Any], boundaries: dict[str, Any]) -> Any:
            return fn(*inputs, dataclasses.replace(context, **boundaries))

        whole = aot_function(
            flat, fw_compiler=functools.partial(self._graph, f"{name}, forward"),
            bw_compiler=functools.partial(self._graph, f"{name}, backward"),
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"), decompositions=select_decomp_table())
        made = False

        def call(inputs: list[Any], boundaries: dict[str, Any]) -> Any:
            nonlocal made
            if not made:  # tracing runs inside the first call
                with self.meter.unobserved():
                    made, _ = True, whole(inputs, boundaries)
            return whole(inputs, boundaries)

        return call

    def _graph(self, name: str, graph: Any, inputs: Any) -> Any:
        analysed = self.meter.trace.graphs[name] = analyse(name, graph, self.load)

        def run(*args: Any) -> Any:
            if self.meter.silent:
                return graph(*args)
            with self.meter.unobserved():
                out = graph(*args)
            self.meter.note(analysed.transient_bytes)
            self.meter.trace.events.append(analysed)
            with self.meter.within("activations" if name.endswith("forward") else "gradients on their way"):
                self.meter.hold([t for t in tree_leaves(out) if isinstance(t, Tensor)])
            return out

        return make_boxed_func(run)


def trace_step(cfg: Config, world: int, gpu: bool, memory_bytes: float, load: Load, rank: int = 0) -> Trace:
    """What rank `rank` of `world` does in a step, with the kernels of a GPU or of a CPU, and so much memory.

    Tensors say that they are on a CPU either way: a torch without CUDA cannot index even fake ones elsewhere.
    """
    trace = Trace()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with ExitStack() as stack:
            stack.enter_context(replaced(cfg, gpu, memory_bytes))
            places = make_mesh(cfg.parallel, torch.device("cpu"))
            trace.groups = axes(places)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            state = empty_state(cfg, places)
            static = make_engine(cfg, places)
            packed = {name: torch.from_numpy(value) for name, value in pack_row([], cfg.data.rows[-1]).items()}
            row = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in packed.items()}
            with Meter(trace, load, BLOCK_BYTES if gpu else 1) as meter:
                follow(meter, state, static, cfg)
                stack.enter_context(mock.patch.object(training_step, "row_loss", _measured(meter, training_step.row_loss)))
                make_step(cfg, places, static)(state, [row] * cfg.train.accumulate)
    finally:
        dist.destroy_process_group()
    return trace


@contextmanager
def replaced(cfg: Config, gpu: bool, memory_bytes: float) -> Iterator[None]:
    """What asks a device or other ranks for a value gets the answer that is planned with."""
    with ExitStack() as stack:
        for module, name, instead in (
                (mesh, "_group_of", lambda groups, backend=None: None), (expert, "plan", balanced(cfg)),
                (training_step, "memory_bytes", lambda device: memory_bytes), (training_step, "every_rank", lambda flag, device: flag)):
            stack.enter_context(mock.patch.object(module, name, instead))
        if cfg.compile.enabled:
            stack.enter_context(mock.patch.object(engine, "recomputed", _marked))
        if gpu:
            stack.enter_context(mock.patch.object(launch, "serves", lambda t, implementations: "triton" in implementations))
            losses = linear_cross_entropy.IMPLEMENTATIONS
            stack.enter_context(mock.patch.dict(losses, {"chunked": losses["triton"]}))
        yield


def balanced(cfg: Config) -> Callable[..., expert.Plan]:
    """The exchange of tokens for experts that are chosen evenly."""
    def plan(ids_TK: Tensor, n_local: int, group: Any) -> expert.Plan:
        tokens, ranks = len(ids_TK), group.size()
        rows = round(tokens * meeting(cfg.model.decoder.n_experts, cfg.model.decoder.top_k, ranks))
        return expert.Plan(ids_TK.new_zeros(rows * ranks), ids_TK.new_zeros(tokens, ranks), [rows] * ranks, [rows] * ranks)

    return plan


def meeting(n_experts: int, top_k: int, ranks: int) -> float:
    """How likely one of a token's experts is on a given rank."""
    return 1 - math.comb(n_experts - n_experts // ranks, top_k) / math.comb(n_experts, top_k)


def axes(places: Mesh) -> dict[str, tuple[str, list[int]]]:
    """What each process group is for, all of it where axes have the same ranks, and its ranks."""
    named = {"tp": places.tp_group, "cp": places.cp_group, "ep": places.ep_group, "cp and tp": places.split_group}
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
    spec, dtype = speech_lm.spec(cfg), master_dtype(cfg)

    def part(p: params.P) -> Any:
        if p.kind == "buffer":
            return torch.empty(p.shape, device=places.device)
        return sharding.from_local(p, torch.empty([n for _, n in sharding.local_box(p, places)], dtype=dtype, device=places.device), places)

    return init_state(spec, cfg.seed, places, dtype, {name: part(p) for name, p in params.named_leaves(spec)}, moments=moment_dtype(cfg))


def follow(meter: Meter, state: State, static: Engine, cfg: Config) -> None:
    """Counts the state, and makes the trainer's own parts say what their memory is for."""
    for purpose, tensors in (("parameters", state.params), ("moments", state.first), ("moments", state.second)):
        with meter.within(purpose):
            meter.hold(list(sharding.local(tensors).values()))
    with meter.within("buffers"):
        meter.hold(list(state.buffers.values()))
    meter.trace.state = Counter(meter.live)
    if cfg.compile.enabled:
        static.function = Layers(meter, meter.load).function  # type: ignore[method-assign]
    for unit in {id(u): u for u in (*static.units.values(), *static.joined.values())}.values():
        for name, purpose in (("start", "gathered weights"), ("finish", "gathered weights"), ("reduce", "gradients")):
            setattr(unit, name, _within(meter, purpose, getattr(unit, name)))


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
    def call(*args: Any, **kwargs: Any) -> Any:
        before = meter.live.total()
        out = loss(*args, **kwargs)
        meter.trace.forward_bytes = meter.live.total() - before
        return out

    return call


def _within(meter: Meter, purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with meter.within(purpose):
            return function(*args, **kwargs)

    return call
