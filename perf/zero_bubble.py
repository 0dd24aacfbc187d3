"""Whether a pipeline waits less when a stage computes the gradient of its input, sends it, and only then computes those of its weights.

That is what zero-bubble schedules rest on (Qi et al. 2023, arXiv:2401.10241). Two stages on gloo processes take turns with both ways, 1f1b,
compiled and eager. Under torchrun this module is the worker: zero_bubble compiled|eager ROUNDS.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from parallel.collectives import gather_objects
from parallel.mesh import make_mesh, start_processes
from parallel.pipeline import Stage
from perf.plan_check import UTTERANCES
from perf.plan_check_worker import MODEL, row
from perf.timing import alternate
from tests.dist.launch import leave, torchrun
from training import config
from training import step as training_step
from training.pipeline import Part, StepWork, Transfers
from training.step import make_engine, make_state, make_step

STAGES, ROWS = 2, 4
OVERRIDES = ("model.decoder.pattern=*-*-*-*-*-*-", "model.decoder.d_model=256", "model.decoder.mlp_ffn=1024", f"parallel.pp={STAGES}",
             f"train.accumulate={ROWS}", "optimizer.lr=0.0", "optimizer.min_lr=0.0")


class Apart(StepWork):
    """The backward of a stage in two: of its input, and later of its weights."""

    later: ClassVar[list[Callable[[], object]]] = []

    def backward(self, stage: Stage, part: Part, dy_TD: Tensor | None) -> Tensor | None:
        if part.x_TD is None or not stage.learns_before:
            return super().backward(stage, part, dy_TD)
        ends = [(t, grad) for t, grad in ((part.loss, None), (part.y_TD, dy_TD)) if t is not None]
        outputs, grads = zip(*ends, strict=True)
        (dx_TD,) = torch.autograd.grad(outputs, part.x_TD, grads, retain_graph=True)
        weights = super().backward
        self.later.append(lambda: weights(replace(stage, learns_before=False), part, dy_TD))
        return dx_TD


class SentFirst(Transfers):
    """What has to leave leaves before what can wait is computed."""

    def send(self, x_TD: Tensor, stage: int) -> None:
        super().send(x_TD, stage)
        while Apart.later:
            Apart.later.pop(0)()


def run(rounds: int) -> tuple[dict[str, Any], bool]:
    """Time of a step whose backward is in two over that of one whose backward is whole: below 1 where it helps."""
    found = {name: torchrun(STAGES, "perf.zero_bubble", name, str(rounds)) for name in ("compiled", "eager")}
    result: dict[str, Any] = {f"{name}_ratio": round(times["apart"] / times["whole"], 3) for name, times in found.items()}
    result |= {f"{name}_seconds": {way: round(t, 3) for way, t in times.items()} for name, times in found.items()}
    return result | {"stages": STAGES, "rows": ROWS, "bubble": round((STAGES - 1) / (ROWS + STAGES - 1), 3)}, True


def main() -> None:
    way, rounds = sys.argv[1:]
    torch._functorch.config.donated_buffer = False  # a graph that runs twice keeps what it was given
    cfg, _ = config.load([*MODEL, *OVERRIDES, f"compile.enabled={str(way == 'compiled').lower()}"])
    start_processes(torch.device("cpu"))
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state, step = make_state(cfg, mesh), make_step(cfg, mesh, make_engine(cfg, mesh))
    rows = [row(cfg, number, UTTERANCES) for number in range(ROWS)]
    norms: dict[str, float] = {}

    def whole(name: str = "whole") -> None:
        norms[name] = step(state, rows)[1]["grad_norm"].item()

    def apart() -> None:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(training_step, "StepWork", Apart))
            stack.enter_context(mock.patch.object(training_step, "Transfers", SentFirst))
            whole("apart")

    times = alternate({"whole": whole, "apart": apart}, int(rounds), 2)
    if abs(norms["apart"] / norms["whole"] - 1) > 1e-5:  # the weights stay as they are
        raise RuntimeError(f"the norms of the same gradients differ: {norms}")
    ranks = gather_objects(times)
    leave({name: max(rank[name] for rank in ranks) for name in times})


if __name__ == "__main__":
    main()
