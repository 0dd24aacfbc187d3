"""Worker processes: plans in, packed rows out, in order. A fault in a worker, its death or its silence ends the run as one clear error."""

import atexit
import multiprocessing
import os
import random
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from configs.schema import DataConfig
from data.errors import DataError, UtteranceError, settle
from data.packing import load_of, pack_row
from data.plan import Plan, State
from data.sources import example

Batch = dict[str, Any]


@dataclass
class Made:
    """What a worker sends back."""

    batch: Batch
    dropped: tuple[UtteranceError, ...]
    state: State

    def pin_memory(self) -> "Made":
        """Called by the DataLoader where there is a GPU: copies to it then run beside the step."""
        self.batch = {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in self.batch.items()}
        return self


class Rows(Dataset[Any]):
    """Reads and packs a plan; faults that must end the run are returned, so that they reach the main process as they are."""

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg

    def __getitem__(self, plan: Plan) -> "Made | DataError":
        examples, texts, pieces, dropped = [], [], [], list(plan.dropped)
        for item in plan.items:
            try:
                examples.append(example(item, self.cfg))
                texts.append(item.text)
                pieces.append(item.piece)
            except UtteranceError as error:
                try:
                    dropped.append(settle(error, getattr(self.cfg, f"on_{error.reason}")))
                except DataError as end:
                    return end
            except Exception as error:
                raise RuntimeError(f"while reading utterance {item.id}: {type(error).__name__}: {error}") from error
        arrays = pack_row(examples, plan.row, self.cfg.encoder, self.cfg.multiple, self.cfg.queries)
        batch: Batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["ids"] = [made.id for made in examples]
        batch["texts"] = texts
        batch["pieces"] = pieces
        batch["audio_sec"] = sum(len(made.samples) for made in examples) / self.cfg.sample_rate
        used = sum(load_of(len(e.prompt), len(e.answer), len(e.samples), len(e.end), self.cfg.encoder, queries=self.cfg.queries).tokens
                   for e in examples)
        batch["fill"] = used / plan.row.tokens
        return Made(batch, tuple(dropped), plan.state)


def run_plans(plans: Iterable[Plan], cfg: DataConfig, seeds: tuple[int, int, int]) -> Iterator[Made]:
    """What the workers make of the plans, in their order. `seeds` are the run's seed, the epoch and the rank."""
    awaited: deque[str] = deque()

    def issued() -> Iterator[Plan]:
        for plan in plans:
            awaited.append(", ".join(item.id for item in plan.items[:3]) + (", ..." if len(plan.items) > 3 else ""))
            yield plan

    workers = min(cfg.workers, len(os.sched_getaffinity(0)))  # more would wait for each other
    rows = iter(DataLoader(
        Rows(cfg), sampler=issued(), batch_size=None, collate_fn=_same, num_workers=workers, worker_init_fn=WorkerSetup(seeds),
        timeout=cfg.timeout_sec if workers else 0, generator=torch.Generator(), pin_memory=torch.cuda.is_available()))
    while (made := _next(rows, awaited)) is not None:
        if isinstance(made, DataError):
            del rows  # ends the workers before the error travels on
            raise made
        awaited.popleft()
        yield made


def _next(rows: Iterator[Made | DataError], awaited: deque[str]) -> Made | DataError | None:
    """The next result; an error instead of it if the workers are gone, and None after the last."""
    try:
        return next(rows, None)
    except (RuntimeError, OSError, EOFError) as error:  # the last two: a worker died while its result was on the way
        if type(error) is RuntimeError and not str(error).startswith(("DataLoader timed out", "DataLoader worker")):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"a data worker hangs or was killed while the batch of {awaited[0]} was awaited ({reason}); look at that audio and at "
                     "the memory, or change data.timeout_sec and data.workers")


@dataclass(frozen=True)
class WorkerSetup:
    """Runs first in each worker."""

    seeds: tuple[int, int, int]  # run seed, epoch, rank

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave_to_main_process)
        torch.set_num_threads(1)
        seed_worker(*self.seeds, worker)


def _leave_to_main_process(number: int, frame: FrameType | None) -> None:
    """Whoever ends a run signals all its processes, and the main one still wants its batch before it saves; the second signal counts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@atexit.register
def _end_workers() -> None:
    """Of a program that leaves while it still holds its rows: multiprocessing would send one signal, which they leave to the main process,
    and wait for them."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def seed_worker(seed: int, epoch: int, rank: int, worker: int) -> None:
    """Seeds every global generator of this process, differently for each worker of each rank.

    Nothing here draws from them: what is random is a function of the utterance's number. It is for code that Lhotse's transforms call.
    """
    words = np.random.SeedSequence((seed, epoch, rank, worker)).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


def _same(made: Any) -> Any:
    return made
