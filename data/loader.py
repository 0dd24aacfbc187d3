"""Batches: plans turned into packed rows by worker processes, delivered in the order of the plans with the state to resume from.

A batch is a dict of the tensors of data.packing.pack_row and of what stays on the host: ids, texts and pieces of its utterances,
audio_sec, fill (share of token slots used), counters (utterances skipped so far, by
reason) and state.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from configs.schema import DataConfig, RowSize
from data.audio import count_samples, whole_file
from data.errors import REASONS, DataError, UtteranceError
from data.packing import load_of, pack_row
from data.pieces import in_pieces
from data.plan import Plan, Share, State, digit_plans, finite_plans, manifest_plans
from data.settings import check, row_sizes
from data.sources import FixedSource, Item, Source, training_source, validation_source, writer
from data.workers import Batch, run_plans

log = logging.getLogger(__name__)


def make_loader(cfg: DataConfig, seed: int, rank: int, world: int, state: State | None = None,
                batches_per_step: int = 1) -> Iterator[Batch]:
    """Endless training batches of one data-parallel rank.

    `state` is batch["state"] of the last batch that was used, saved by this rank; the batches after it come as if nothing had happened.
    `batches_per_step` says how many batches an optimizer step takes, for the curriculum.
    """
    source = training_source(cfg, seed)
    rows = row_sizes(cfg) if world == 1 else row_sizes(cfg)[-1:]  # ranks that exchange tokens need equal shapes at every step
    share = Share(seed, rank, world)
    size = len(range(rank, len(source), world))
    if cfg.kind != "digits" and len(source) < world:
        raise DataError(f"data.manifest has {len(source)} utterances for {world} data-parallel processes; give at least one to each")
    header = {"kind": cfg.kind, "world": world, "rank": rank, "seed": seed, "utterances": len(source)}
    state = dict(state or {})
    if state:
        _check_state(state, header)
    plans = digit_plans(source, rows, share, state, batches_per_step) if cfg.kind == "digits" else \
        manifest_plans(source, rows, share, state, cfg)
    ledger = Ledger(size, cfg.max_skipped, **state.get("ledger", {}))
    return _deliver(plans, cfg, ledger, header, (seed, ledger.epoch, rank))


def validation_batches(cfg: DataConfig, name: str, rank: int, world: int) -> Iterator[Batch]:
    """One pass over a validation set, each utterance once over all ranks, the same number of batches on each (the last may be empty)."""
    return _one_pass(validation_source(cfg, name), cfg, rank, world)


def decoding_batches(cfg: DataConfig, name: str, rank: int, world: int) -> Iterator[Batch]:
    """The same of the prompts alone, long audio in pieces; `texts` are the references."""
    cfg = replace(cfg, multiple=1)  # an answer follows at once
    return _one_pass(in_pieces(validation_source(cfg, name), cfg), cfg, rank, world)


def file_batches(cfg: DataConfig, path: str | Path, rank: int, world: int) -> Iterator[Batch]:
    """The same of one audio file without a reference."""
    check(cfg)
    cfg = replace(cfg, multiple=1)
    utterance, written = whole_file(path), writer(cfg)
    samples = count_samples(utterance.duration_sec, cfg.sample_rate)
    load = load_of(len(written.prompt), 0, samples, 0, cfg.encoder, queries=cfg.queries)
    item = Item(utterance.id, "", written.prompt, (), (), load, utterance)
    return _one_pass(in_pieces(FixedSource((item,)), cfg), cfg, rank, world)


def _one_pass(source: Source, cfg: DataConfig, rank: int, world: int) -> Iterator[Batch]:
    plans = finite_plans(source, row_sizes(cfg), cfg, rank, world)
    return _deliver(plans, cfg, Ledger(len(source), cfg.max_skipped), {}, (0, 0, rank), keep_empty=True)


def empty_batch(row: RowSize, encoder: str = "fastconformer", queries: int = 0) -> Batch:
    """A row of no utterance: the shapes of every batch of this size."""
    return {name: torch.from_numpy(array) for name, array in pack_row([], row, encoder, queries=queries).items()}


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
        return {"epoch": self.epoch, "delivered": self.delivered, "skipped": self.skipped, "counters": dict(self.counters)}

    def _end_epoch(self) -> None:
        if self.delivered == 0:
            raise DataError(f"none of the {self.utterances} utterances of this process could be used in epoch {self.epoch}; see the log")


def _deliver(plans: Iterable[Plan], cfg: DataConfig, ledger: Ledger, header: State, seeds: tuple[int, int, int],
             keep_empty: bool = False) -> Iterator[Batch]:
    """Batches in the order of the plans; those that skipping left empty are only counted, unless kept."""
    for made in run_plans(plans, cfg, seeds):
        ledger.enter(made.state.get("epoch", 0), len(made.batch["ids"]), made.dropped)
        if made.batch["ids"] or keep_empty:
            made.batch["counters"] = dict(ledger.counters)
            made.batch["state"] = header | made.state | {"ledger": ledger.saved()}
            yield made.batch


def _check_state(state: State, header: State) -> None:
    """Refuses a position in other data or of another process: utterances would be lost or repeated without a word."""
    for key, value in header.items():
        if state.get(key) != value:
            raise DataError(f"the saved data position is for {key}={state.get(key)} and this run has {key}={value}; resume with the same "
                            f"{key}, or start the data anew")
