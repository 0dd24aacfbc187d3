"""Under torchrun: ten steps of the digits model on fixed rows. Writes losses and the full gradients of the first and the last step.

usage: first_worker OUT EXPERIMENT ROWS_A_RANK REFERENCE OVERRIDES...
The last gradient is taken at the weights that the run which wrote REFERENCE had reached ("-": at its own): a run's own weights are off
by rounding, which a rectifier near its kink turns into a jump of the gradient.
"""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import Config
from data.packing import AUDIO, Example, pack_row
from model import params, speech_lm
from parallel import gather, reduction, sharding
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.gather_worker import LiveMeter
from tests.dist.launch import leave
from training import config
from training.state import init_state
from training.step import Batch, make_engine, make_gradients, make_step

STEPS, ROWS = 10, 2


def rows(cfg: Config, step: int) -> list[Batch]:
    """The global batch of a step: ROWS rows of noise and random transcripts of very different lengths."""
    out = []
    for row in range(ROWS):
        rng = np.random.default_rng((step, row))
        seconds = rng.uniform(0.2, 2.0, size=3 if row == 0 else 6)
        examples = [Example(str(i), [AUDIO], rng.integers(3, 40, size=int(rng.integers(1, 2 + 6 * sec))).tolist(), [1],
                            rng.standard_normal(int(16000 * sec)).astype(np.float32) * 0.1) for i, sec in enumerate(seconds)]
        out.append({name: torch.from_numpy(value) for name, value in pack_row(examples, cfg.data.rows[0], cfg.data.encoder).items()})
    return out


class CollectiveMeter:
    """Counts the data-parallel collectives of dense parameters, by patching what gathers and reductions begin."""

    CALLS = (gather, "all_gather_start"), (reduction, "reduce_scatter_start")

    def __init__(self, mesh: Mesh):
        self.dense, self.counts = mesh.dense.get_group(1), Counter[str]()
        self.patches = [mock.patch.object(module, name, self._counted(name, getattr(module, name))) for module, name in self.CALLS]

    def __enter__(self) -> "CollectiveMeter":
        for patch in self.patches:
            patch.start()
        return self

    def _counted(self, name: str, function: Any) -> Any:
        def call(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            self.counts[name] += group.group_name == self.dense.group_name
            return function(x, group)

        return call

    def __exit__(self, *exc: object) -> None:
        for patch in self.patches:
            patch.stop()


def whole(spec: dict[str, params.P], tensors: dict[str, Any], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Unsharded copies of parameters or of their gradients (which arrive as local shards)."""
    parts = {name: t if hasattr(t, "full_tensor") else sharding.from_local(spec[name], t.contiguous(), mesh) for name, t in tensors.items()}
    return {name: part.full_tensor().clone() for name, part in parts.items()}


def main() -> None:
    out, experiment, a_rank, reference, *overrides = sys.argv[1:]
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([f"+experiment={experiment}", f"train.steps={STEPS}", "optimizer.warmup_steps=2", *overrides])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    spec = dict(params.named_leaves(speech_lm.spec(cfg)))
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh)
    start = whole(spec, state.params, mesh)
    engine = make_engine(cfg, mesh)
    gradients, step = make_gradients(cfg, mesh, engine), make_step(cfg, mesh, engine)
    losses = []
    mine = slice(mesh.rank * int(a_rank), (mesh.rank + 1) * int(a_rank))
    for i in range(STEPS):
        batches = rows(cfg, i)[mine]
        if i == 0:
            first = whole(spec, gradients(state, batches).grads, mesh)
        if i == STEPS - 1:
            weights = whole(spec, state.params, mesh) if reference == "-" else torch.load(reference)["weights"]
            shared = replace(state, params={name: sharding.shard(spec[name], w, mesh) for name, w in weights.items()})
            with LiveMeter() as live, CollectiveMeter(mesh) as collectives:
                last = whole(spec, gradients(shared, batches).grads, mesh)
        state, metrics = step(state, batches)
        losses.append(metrics["loss"].item())
    if mesh.rank == 0:
        torch.save({"start": start, "first": first, "last": last, "weights": weights}, out)
    leave({"losses": losses, "live_max": live.most, "collectives_per_layer": sum(collectives.counts.values()) / len(engine.order)})


if __name__ == "__main__":
    main()
