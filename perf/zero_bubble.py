"""Whether a pipeline waits less when its stages compute gradients of inputs and of weights apart, on which zero-bubble schedules rest.

Two gloo processes; a schedule with whole backwards and one with halves take turns in one run. Under torchrun this module is the worker:
zero_bubble WHOLE HALVED CHUNKS ROUNDS.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from parallel.collectives import gather_objects
from parallel.mesh import make_mesh, start_processes
from perf.plan_check import UTTERANCES
from perf.plan_check_worker import MODEL, row
from perf.timing import alternate
from tests.dist.launch import leave, torchrun
from training import config
from training.step import make_engine, make_state, make_step

RANKS, ROWS = 2, 4
OVERRIDES = ("model.decoder.pattern=*-*-*-*-*-*-", "model.decoder.d_model=256", "model.decoder.mlp_ffn=1024", f"parallel.pp={RANKS}",
             f"train.accumulate={ROWS}", "compile.enabled=true", "optimizer.lr=0.0", "optimizer.min_lr=0.0")
CONTESTS = (("1f1b", "zero_bubble", 1), ("interleaved_1f1b", "zbv", 2))  # with whole backwards, with halves, stages a rank


def run(rounds: int) -> tuple[dict[str, Any], bool]:
    """Time of a step by the schedule with halves over that by the other: below 1 where it helps."""
    result: dict[str, Any] = {}
    for whole, halved, chunks in CONTESTS:
        times = torchrun(RANKS, "perf.zero_bubble", whole, halved, str(chunks), str(rounds))
        result[f"{halved}_ratio"] = round(times[halved] / times[whole], 3)
        result[f"{halved}_seconds"] = {schedule: round(t, 3) for schedule, t in times.items()}
    return result | {"ranks": RANKS, "rows": ROWS}, True


def main() -> None:
    *schedules, chunks, rounds = sys.argv[1:]
    start_processes(torch.device("cpu"))
    norms: dict[str, float] = {}
    calls: dict[str, Callable[[], None]] = {}
    for schedule in schedules:
        cfg, _ = config.load([*MODEL, *OVERRIDES, f"parallel.pp_schedule={schedule}", f"parallel.pp_chunks={chunks}"])
        mesh = make_mesh(cfg.parallel, torch.device("cpu"))
        state, step = make_state(cfg, mesh), make_step(cfg, mesh, make_engine(cfg, mesh))
        rows = [row(cfg, number, UTTERANCES) for number in range(ROWS)]

        def call(schedule: str, once: Callable[[], Any]) -> None:
            norms[schedule] = once()[1]["grad_norm"].item()

        calls[schedule] = functools.partial(call, schedule, functools.partial(step, state, rows))
        calls[schedule]()  # compiles as it would without the other
    times = alternate(calls, int(rounds), 1)
    whole, halved = norms.values()
    if abs(halved / whole - 1) > 1e-5:  # the weights stay as they are
        raise RuntimeError(f"the norms of the same gradients differ: {norms}")
    ranks = gather_objects(times)
    leave({name: max(rank[name] for rank in ranks) for name in times})


if __name__ == "__main__":
    main()
