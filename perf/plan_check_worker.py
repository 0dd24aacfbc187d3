"""Under torchrun: one step of a scaled-down model, measured, and what plan.py says about it.

usage: plan_check_worker UTTERANCES OVERRIDES...
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import Config
from data.packing import AUDIO, Example, pack_row
from parallel.collectives import gather_objects
from parallel.mesh import make_mesh, start_processes
from perf.planning.planner import load
from perf.planning.timeline import bytes_by_axis
from perf.planning.trace import trace_step
from training import config
from training import step as training_step
from training.step import Batch, make_engine, make_state, make_step

FORWARD = "forward pass"  # a span's name
SETTLED_SEC = 0.1  # after which gloo's threads hold nothing of a finished collective
ANSWER = 14  # tokens
ROW = "{tokens: 512, audio_frames: 352, utterances: 12, utterance_frames: 64, label_tokens: 16}"
MODEL = ("+experiment=nemotron_ep8", "model=nemotron3_tiny", "data=digits", "parallel=single", "precision=fp32", "compile.enabled=false",
         f"data.rows=[{ROW}]", "model.decoder.mamba_groups=4", "train.activation_checkpointing=none",
         "train.activation_checkpointing_encoder=none")


def main() -> None:
    utterances, overrides = int(sys.argv[1]), sys.argv[2:]
    cfg, _ = config.load([*MODEL, *overrides])
    start_processes(torch.device("cpu"))
    measured, first, world = gather_objects(measure(cfg, utterances)), dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if first:
        padded = row(cfg, 0, utterances)["segments_T"] == cfg.data.rows[0].utterances
        places = range(0, world, world // cfg.parallel.pp)
        predicted = [predict(cfg, world, rank, 1 - padded.double().mean().item()) for rank in places]
        print(json.dumps([{name: {"predicted": said[name], "measured": value} for name, value in measured[rank].items()}
                          for rank, said in zip(places, predicted, strict=True)]))


def row(cfg: Config, number: int, utterances: int) -> Batch:
    """Utterances of two seconds; twelve fill it."""
    rng = np.random.default_rng(number)
    examples = [Example(str(i), [AUDIO, 5, 6], rng.integers(7, 50, size=ANSWER).tolist(), [1], rng.standard_normal(32000, dtype=np.float32))
                for i in range(utterances)]
    return {name: torch.from_numpy(value) for name, value in pack_row(examples, cfg.data.rows[0]).items()}


def measure(cfg: Config, utterances: int) -> dict[str, float]:
    """Bytes of the state, of what forward passes leave for their backward passes, and those that this rank receives in a step."""
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as making:
        state = make_state(cfg, mesh)
    loss, compiled = training_step.row_loss, functools.partial(torch.compile, backend=graphs_as_they_are)
    with mock.patch.object(training_step, "row_loss", marked(loss)), mock.patch.object(torch, "compile", compiled):
        step = make_step(cfg, mesh, make_engine(cfg, mesh))
        rows = [row(cfg, mesh.dp_rank + i * mesh.dp, utterances) for i in range(cfg.train.accumulate)]
        state, _ = step(state, rows)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace, nullcontext() if cfg.compile.enabled else KEPT:
            state, _ = step(state, rows)
        result: dict[str, float] = {"state": allocated(making)[-1], "activation": left(trace)}
        if not cfg.compile.enabled:  # nothing compiled runs under such a mode
            with Received() as received:
                step(state, rows)
            result["bytes"] = received.bytes
    return result


def marked(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a span of the profile."""
    def call(*args: Any, **kwargs: Any) -> Any:
        KEPT.let_go()
        with record_function(FORWARD):
            out = loss(*args, **kwargs)
            KEPT.let_go()
            return out

    return call


class Watching(TorchDispatchMode):
    """Is told of every operator that runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, AsyncCollectiveTensor) for t in types):
            return NotImplemented  # which asks again, unwrapped
        out = func(*args, **(kwargs or {}))
        self.ran(str(func).removesuffix(".default"), args, out)
        return out

    def ran(self, name: str, args: Any, out: Any) -> None:
        """After each of them."""
        raise NotImplementedError


class Kept(Watching):
    """Keeps the tensors of collectives for a while: what one of gloo's threads is the last to give back, the profiler does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Any] = []

    def ran(self, name: str, args: Any, out: Any) -> None:
        if "c10d" in name:
            self.tensors.append((args, out))

    def let_go(self) -> None:
        """Give back what has been kept, once gloo's threads have."""
        time.sleep(SETTLED_SEC)
        self.tensors.clear()

    def run(self, graph: Any, *inputs: Any) -> Any:
        """A compiled graph, which nothing but itself can put into this mode."""
        with self:
            return graph.forward(*inputs)


KEPT = Kept()


def graphs_as_they_are(graph: Any, inputs: Any) -> Any:
    """Cut into forward and backward as Inductor does, and then run by PyTorch's own operators."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(fw_compiler=lambda g, i: make_boxed_func(functools.partial(KEPT.run, g)), decompositions=select_decomp_table(),
                        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"))(graph, inputs)


def allocated(trace: Any, moments: Sequence[int] = (1 << 63,)) -> list[int]:
    """What the allocator had given out since the profile began and not got back, at these moments (ns) or at the end."""
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [sum(e.nbytes() for e in events if e.start_ns() <= moment) for moment in moments]


def left(trace: Any) -> int:
    """The most that was there at the end of a row's forward pass and had not been before the first one."""
    spans = [e for e in trace.profiler.kineto_results.events() if e.name() == FORWARD]
    before, *after = allocated(trace, [min(e.start_ns() for e in spans), *(e.start_ns() + e.duration_ns() for e in spans)])
    return max(after) - before


class Received(Watching):
    """Counts what each collective brings from other ranks."""

    bytes = 0.0

    def ran(self, name: str, args: Any, out: Any) -> None:
        match name:
            case "_c10d_functional.all_gather_into_tensor":
                self.bytes += out.nbytes - args[0].nbytes
            case "_c10d_functional.reduce_scatter_tensor":
                self.bytes += args[0].nbytes - out.nbytes
            case "_c10d_functional.all_reduce" | "_c10d_functional.all_reduce_":
                self._reduced(args[0], _resolve_process_group(args[2]).size())
            case "c10d.allreduce_":
                self._reduced(args[0][0], dist.ProcessGroup.unbox(args[1]).size())
            case "c10d.recv_":
                self.bytes += sum(t.nbytes for t in args[0])
            case "reedling.hand_on":
                self.bytes += sum(t.nbytes for t in out)
            case "_c10d_functional.all_to_all_single":
                own = args[1][_resolve_process_group(args[3]).rank()]
                self.bytes += out.nbytes * (1 - own / max(1, len(out)))

    def _reduced(self, x: Tensor, ranks: int) -> None:
        self.bytes += 2 * x.nbytes * (ranks - 1) / ranks


def predict(cfg: Config, world: int, rank: int, fill: float) -> dict[str, float]:
    """The same by plan.py."""
    trace = trace_step(cfg, world, False, 1 << 40, load(cfg, fill=fill), rank)
    return {"state": trace.state.total(), "activation": trace.forward_bytes, "bytes": bytes_by_axis(trace).total()}


if __name__ == "__main__":
    main()
