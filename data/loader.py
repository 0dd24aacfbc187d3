"""Batches: plans turned into packed rows by worker processes, delivered in the order of the plans with the state to resume from.

A batch is a dict of the tensors of data.packing.pack_row and of what stays on the host: ids and texts of its utterances, audio_sec, fill
(share of token slots used), counters (utterances skipped so far, by reason) and state.
"""

import logging
import random
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from configs.schema import DataConfig
from data.audio import count_samples, whole_file
from data.errors import REASONS, DataError, UtteranceError
from data.packing import load_of, pack_row
from data.plan import Plan, Share, State, digit_plans, finite_plans, manifest_plans, settle
from data.sources import Item, check, example, row_sizes, training_source, validation_source, writer

Batch = dict[str, Any]
log = logging.getLogger(__name__)


def make_loader(cfg: DataConfig, seed: int, rank: int, world: int, state: State | None = None, batches_per_step: int = 1) -> Iterator[Batch]:
    """Endless training batches of one data-parallel rank.

    `state` is batch["state"] of the last batch that was used, saved by this rank; the batches after it come as if nothing had happened.
    `batches_per_step` says how many batches an optimizer step takes, for the curriculum.
    """
    source = training_source(cfg, seed)
    rows = row_sizes(cfg)
    share = Share(seed, rank, world)
    size = len(range(rank, len(source), world))
    if cfg.kind == "manifest" and len(source) < world:
        raise DataError(f"data.manifest has {len(source)} utterances for {world} data-parallel processes; give at least one to each")
    header = dict(kind=cfg.kind, world=world, rank=rank, seed=seed, utterances=len(source))
    state = dict(state or {})
    if state:
        _check_state(state, header)
    plans = digit_plans(source, rows, share, state, batches_per_step) if cfg.kind == "digits" else \
        manifest_plans(source, rows, share, state, cfg)
    ledger = Ledger(size, cfg.max_skipped, **state.get("ledger", {}))
    return _deliver(plans, cfg, ledger, header, (seed, ledger.epoch, rank))


def validation_batches(cfg: DataConfig, name: str, rank: int, world: int, answers: bool = True) -> Iterator[Batch]:
    """One pass over a validation set, each utterance once over all ranks, the same number of batches on each (the last may be empty).

    With answers=False a row holds the prompts alone, for decoding; `texts` are the references either way.
    """
    source = validation_source(cfg, name)
    plans = finite_plans(source, row_sizes(cfg), cfg, answers, rank, world)
    return _deliver(plans, cfg, Ledger(len(source), cfg.max_skipped), {}, (0, 0, rank), keep_empty=True)


def file_batch(cfg: DataConfig, path: str | Path) -> Batch:
    """A batch of one audio file, its prompt alone and no reference."""
    check(cfg)
    utterance = whole_file(path)
    written = writer(cfg)
    load = load_of(len(written.prompt), 0, count_samples(utterance.duration_sec, cfg.sample_rate), ends=0)
    row = next((row for row in row_sizes(cfg) if not load.excess(row)), None)
    if row is None:
        excess = load.excess(row_sizes(cfg)[-1])
        raise DataError(f"{path} lasts {utterance.duration_sec:.1f} s and does not fit the largest of data.rows ({excess}); split it")
    item = Item(utterance.id, "", written.prompt, (), (), load, utterance)
    made = _Rows(cfg)[Plan((item,), row, (), {})]
    if isinstance(made, DataError):
        raise made
    return made.batch


@dataclass
class Ledger:
    """Counts what was skipped, and ends the run when it is too much."""

    utterances: int  # of an epoch, on this rank
    max_share: float
    epoch: int = 0
    delivered: int = 0  # in this epoch
    skipped: int = 0  # in this epoch
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # since the start of the run

    def enter(self, epoch: int, delivered: int, dropped: Iterable[UtteranceError]) -> None:
        """Takes in one batch."""
        if epoch != self.epoch:
            self._end_epoch()
            self.epoch, self.delivered, self.skipped = epoch, 0, 0
        self.delivered += delivered
        for error in dropped:
            self.counters[error.reason] += 1
            self.skipped += 1
            log.warning("skipped (%s): %s", error.reason, error)
            if self.skipped > self.max_share * self.utterances:
                raise DataError(f"{self.skipped} of {self.utterances} utterances of epoch {epoch} were skipped, more than "
                                f"data.max_skipped={self.max_share}, the last because: {error}; repair the data or raise the limit")

    def saved(self) -> State:
        """What a resumed run needs to go on counting."""
        return dict(epoch=self.epoch, delivered=self.delivered, skipped=self.skipped, counters=dict(self.counters))

    def _end_epoch(self) -> None:
        if self.delivered == 0:
            raise DataError(f"none of the {self.utterances} utterances of this process could be used in epoch {self.epoch}; see the log")


@dataclass
class _Made:
    """What a worker sends back."""

    batch: Batch
    dropped: tuple[UtteranceError, ...]
    state: State


class _Rows(Dataset[Any]):
    """Reads and packs a plan; faults that must end the run are returned, so that they reach the main process as they are."""

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg

    def __getitem__(self, plan: Plan) -> "_Made | DataError":
        examples, texts, dropped = [], [], list(plan.dropped)
        for item in plan.items:
            try:
                examples.append(example(item, self.cfg))
                texts.append(item.text)
            except UtteranceError as error:
                try:
                    dropped.append(settle(error, self.cfg))
                except DataError as end:
                    return end
            except Exception as error:
                raise RuntimeError(f"while reading utterance {item.id}: {type(error).__name__}: {error}") from error
        arrays = pack_row(examples, plan.row)
        batch: Batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["ids"] = [made.id for made in examples]
        batch["texts"] = texts
        batch["audio_sec"] = sum(len(made.samples) for made in examples) / self.cfg.sample_rate
        batch["fill"] = float(arrays["cu_seqlens_U1"][-1]) / plan.row.tokens
        return _Made(batch, tuple(dropped), plan.state)


def _deliver(plans: Iterable[Plan], cfg: DataConfig, ledger: Ledger, header: State, seeds: tuple[int, int, int],
             keep_empty: bool = False) -> Iterator[Batch]:
    """Batches in the order of the plans; those that skipping left empty are only counted, unless kept."""
    for made in _run(plans, cfg, seeds):
        ledger.enter(made.state.get("epoch", 0), len(made.batch["ids"]), made.dropped)
        if made.batch["ids"] or keep_empty:
            made.batch["counters"] = dict(ledger.counters)
            made.batch["state"] = header | made.state | dict(ledger=ledger.saved())
            yield made.batch


def _run(plans: Iterable[Plan], cfg: DataConfig, seeds: tuple[int, int, int]) -> Iterator[_Made]:
    """The plans through the workers, and a worker's end, however it came, as one error."""
    awaited: deque[str] = deque()

    def issued() -> Iterator[Plan]:
        for plan in plans:
            awaited.append(", ".join(item.id for item in plan.items[:3]) + (", ..." if len(plan.items) > 3 else ""))
            yield plan

    loader = DataLoader(_Rows(cfg), sampler=issued(), batch_size=None, collate_fn=_same, num_workers=cfg.workers,
                        timeout=cfg.timeout_sec if cfg.workers else 0, worker_init_fn=_WorkerSetup(seeds),
                        generator=torch.Generator(), pin_memory=torch.cuda.is_available())
    batches = iter(loader)
    while True:
        try:
            made = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if str(error).startswith(("DataLoader timed out", "DataLoader worker")):
                raise DataError(f"a data worker gave nothing while the batch of {awaited[0]} was awaited ({_first_line(error)}); its reading "
                                "hangs or the worker was killed, often for memory: see data.timeout_sec and data.workers") from error
            raise
        awaited.popleft()
        if isinstance(made, DataError):
            raise made
        yield made


@dataclass(frozen=True)
class _WorkerSetup:
    """Runs first in each worker."""

    seeds: tuple[int, int, int]  # run seed, epoch, rank

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler inherited from the training loop would keep the worker alive
        torch.set_num_threads(1)
        seed_worker(*self.seeds, worker)


def seed_worker(seed: int, epoch: int, rank: int, worker: int) -> None:
    """Seeds every global generator of this process, differently for each worker of each rank.

    Nothing here draws from them: what is random is a function of the utterance's number. It is for code that Lhotse's transforms call.
    """
    words = np.random.SeedSequence((seed, epoch, rank, worker)).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


def _check_state(state: State, header: State) -> None:
    """Refuses a position in other data or of another process: utterances would be lost or repeated without a word."""
    for key, value in header.items():
        if state.get(key) != value:
            raise DataError(f"the saved data position is for {key}={state.get(key)} and this run has {key}={value}; resume with the same "
                            f"{key}, or start the data anew")


def _same(made: Any) -> Any:
    return made


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
