"""Under torchrun: the figures of perf.graphs for one layout.

usage: graphs_worker compiled|waits OVERRIDES...
"""

import functools
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from configs.schema import Config
from kernels import launch, linear_cross_entropy
from model import speech_lm
from parallel import reduction
from parallel.collectives import wait
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.cells import Cell, batches
from tests.dist.launch import leave
from training.engine import Engine
from training.state import State, init_state
from training.step import Batch, make_engine, make_step, state_dtype
from training.telemetry import compilations

ROOT = Path(__file__).resolve().parents[1]
SENDS = re.compile(r"_c10d_functional::(all_gather|reduce_scatter|all_reduce|all_to_all|wait)\w*")
GRAPH = "graph: "  # begins the name of the span in which a graph runs
REDUCED = "a reduction is waited for"  # name of a span
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")  # what waits for a tensor's value


class Recorder:
    """Takes the place of torch.compile: counts the collectives in each function's graphs, and names the graphs while they run."""

    def __init__(self) -> None:
        self.compile, self.collectives = torch.compile, dict[str, dict[str, int]]()

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        name = f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"
        return self.compile(fn, backend=functools.partial(self._backend, name), **options)

    def _backend(self, name: str, graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        forward, backward = (functools.partial(self._graph, name, way) for way in ("forward", "backward"))
        return aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)(graph, inputs)

    def _graph(self, name: str, way: str, graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        sent = [str(n.target) for n in graph.graph.nodes if str(n.target).startswith("_c10d_functional.")]
        self.collectives.setdefault(name, {"forward": 0, "backward": 0})[way] = sum("wait_tensor" not in target for target in sent)

        def marked(*args: Any) -> Any:
            with record_function(f"{GRAPH}{name}, {way}"):
                return graph.forward(*args)

        return make_boxed_func(marked)


def prepare(cell: Cell) -> tuple[Config, Mesh, Engine, State, list[list[Batch]]]:
    """What a step needs, and this rank's rows of three steps, whose utterances have different lengths."""
    cfg = cell.config("fp32")
    cfg.train.accumulate = 1
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh, state_dtype(cfg))
    rows = batches(cfg, cell)
    return cfg, mesh, make_engine(cfg, mesh), state, [[rows[(mesh.dp_rank + step) % len(rows)]] for step in range(3)]


def compiled(cell: Cell) -> dict[str, Any]:
    """Graphs, breaks, recompilations and collectives of steps that run as graphs of layers."""
    recorder = Recorder()
    with mock.patch.object(torch, "compile", recorder):
        cfg, mesh, engine, state, steps = prepare(cell)
        step = make_step(cfg, mesh, engine)
        state, _ = step(state, steps[0])
        before = compilations()
        state, _ = step(state, steps[1])
        with profile(activities=[ProfilerActivity.CPU]) as trace, mock.patch.object(reduction, "wait", record_function(REDUCED)(wait)):
            step(state, steps[2])
    events = timeline(sorted(trace.events(), key=lambda e: (e.time_range.start, -e.time_range.end)))
    between = Counter(what for what, *_ in events if not what.startswith(GRAPH))
    runs = {way: [counts for what, *counts in events if what.startswith(GRAPH) and what.endswith(way)] for way in ("forward", "backward")}
    return {
        "graphs": before, "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()), "recompiles": compilations() - before,
        "collectives_per_layer": round((between["all_gather"] + between["reduce_scatter"] + between["all_reduce"]) / len(engine.order), 2),
        "collectives_in_graphs": recorder.collectives, "expert_layers": cfg.model.decoder.pattern.count("E"),
        "graphs_with_a_gather_under_way": {way: f"{sum(g > 0 for g, _ in counts)} of {len(counts)}" for way, counts in runs.items()},
        "graphs_with_a_reduction_under_way": f"{sum(r > 0 for _, r in runs['backward'])} of {len(runs['backward'])}",
        "order": events}


def timeline(events: Sequence[Any]) -> list[tuple[str, int, int]]:
    """What runs between the graphs, and the graphs as one each: with how many gathers, and how many sums of gradients, have begun and are
    not yet waited for."""
    found: list[tuple[str, int, int]] = []
    gathers, reductions, inside = 0, 0, 0.0
    for event in events:
        sends = SENDS.fullmatch(event.name)
        if event.time_range.start < inside or not (sends or event.name.startswith((GRAPH, REDUCED))):
            continue
        what, inside = sends[1] if sends else event.name, event.time_range.end
        gathers += (what == "all_gather") - (what == "wait")
        reductions += (what in ("reduce_scatter", "all_reduce")) - (what == REDUCED)
        if what not in ("wait", REDUCED):
            found.append((what, gathers, reductions))
    return found


def waits(cell: Cell) -> dict[str, Any]:
    """How often the host waits for a value in one step that takes a GPU's kernels."""
    taken = dict(linear_cross_entropy.IMPLEMENTATIONS)
    with mock.patch.object(launch, "serves", lambda t, implementations: "triton" in implementations), \
            mock.patch.dict(linear_cross_entropy.IMPLEMENTATIONS, {"chunked": taken["triton"]}):
        cfg, mesh, engine, state, steps = prepare(cell)
        step = make_step(cfg, mesh, engine)
        with host_reads() as reads:
            step(state, steps[0])
    return {"host_syncs": sum(reads.values()), "host_syncs_where": dict(reads)}


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Counts by function of this repository what reads a tensor's value, on whichever device; what Triton's interpreter reads is left out,
    since on a GPU it does not exist."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, _counted(getattr(Tensor, name), counts)))
        yield counts


def _counted(read: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = next((f for f in reversed(traceback.extract_stack()[:-1]) if f"{Path(torch.__file__).parent}/" not in f.filename), None)
        if caller is not None and Path(caller.filename).is_relative_to(ROOT) and "site-packages" not in caller.filename:
            counts[f"{Path(caller.filename).relative_to(ROOT)}: {caller.name}"] += 1
        return read(*args, **kwargs)

    return call


def main() -> None:
    what, *overrides = sys.argv[1:]
    keys = dict(override.removeprefix("parallel.").split("=") for override in overrides)
    start_processes(torch.device("cpu"))
    cell = Cell("", dist.get_world_size(), dict(keys), rows=4, compiled="layer" if what == "compiled" else "")
    result = {"compiled": compiled, "waits": waits}[what](cell)
    leave(result)


if __name__ == "__main__":
    main()
