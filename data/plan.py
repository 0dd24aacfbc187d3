"""Which utterances make which batch. Plans cost no audio and are made in one place, so that the order of the batches and the state to
resume from depend neither on how many workers read the audio nor on how far they are ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.schema import DataConfig, RowSize
from data.errors import UtteranceError, settle
from data.manifest import Utterance
from data.packing import Load
from data.sources import Item, Source, indices

State = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """One batch to be made."""

    items: tuple[Item, ...]
    row: RowSize
    dropped: tuple[UtteranceError, ...]  # utterances that were skipped while this batch was planned
    state: State  # where planning goes on after this batch


@dataclass(frozen=True)
class Share:
    """Which part of the data a rank sees."""

    seed: int
    rank: int
    world: int


def digit_plans(source: Source, rows: Sequence[RowSize], share: Share, state: State, batches_per_step: int) -> Iterator[Plan]:
    """Endless batches of consecutive strings. State: epoch (always 0), index of the next string, number of the next batch."""
    index, batch = state.get("index", 0), state.get("batch", 0)
    while True:
        step = batch // batches_per_step
        window = [source.item((index + i) * share.world + share.rank, step) for i in range(rows[-1].utterances)]
        taken, row = take([item.load for item in window], rows, in_order=True)
        index, batch = index + len(taken), batch + 1
        yield Plan(tuple(window[: len(taken)]), row, (), {"epoch": 0, "index": index, "batch": batch})


def manifest_plans(source: Source, rows: Sequence[RowSize], share: Share, state: State, cfg: DataConfig) -> Iterator[Plan]:
    """Batches of epoch after epoch; each utterance is in one plan an epoch, or among the dropped of one.

    State: epoch, position of the next utterance in this rank's order, and the positions still waiting in the look-ahead window; where
    another number of ranks had begun an epoch also `before` (see resumed).
    """
    epoch, position, pending = state.get("epoch", 0), state.get("position", 0), list(state.get("pending", []))
    kept = {"before": state["before"]} if state.get("before") else {}
    while True:
        order = _order(len(source), share, epoch, cfg.shuffle, state.get("before", []))
        for plan in _epoch_plans(source, order, rows, cfg, epoch, position, pending):
            yield replace(plan, state=plan.state | kept)
        epoch, position, pending = epoch + 1, 0, []


def _order(count: int, share: Share, epoch: int, shuffle: bool, before: Sequence[Sequence[State]]) -> np.ndarray:
    """Utterances of one rank in one epoch: its share of all, or of what the last ranks `before` left if they had begun this epoch."""
    if not before or all(s["epoch"] < epoch for s in before[-1]):
        return indices(count, share.seed, epoch, share.rank, share.world, shuffle)
    return np.concatenate([_left(count, share.seed, epoch, shuffle, s, before[:-1]) for s in before[-1]])[share.rank :: share.world]


def _left(count: int, seed: int, epoch: int, shuffle: bool, state: State, before: Sequence[Sequence[State]]) -> np.ndarray:
    """What a rank that had come to `state` had not used of an epoch."""
    order = _order(count, Share(seed, state["rank"], state["world"]), epoch, shuffle, before)
    if state["epoch"] == epoch:
        return order[[*state["pending"], *range(state["position"], len(order))]]
    return order[:0] if state["epoch"] > epoch else order


def resumed(states: Sequence[State], rank: int, world: int) -> State:
    """Where `rank` of `world` goes on, given the state of every rank of a run of the same or of another number of ranks.

    With another number, what is left of the epochs that have begun is divided anew, so that every utterance still comes once in an epoch:
    `before` holds the states of the ranks that left it, and of those that left it to them. Of digit strings, which never end, a few may be
    left out.
    """
    ranks = {s["rank"]: s for s in states}  # several ranks may have read the same rows
    last = [{key: value for key, value in ranks[number].items() if key != "before"} for number in sorted(ranks)]
    epoch, before = min(s["epoch"] for s in last), states[0].get("before", [])
    if before and all(s["epoch"] < epoch for s in before[-1]):
        before = []
    if len(last) == world:
        return last[rank] | ({"before": before} if before else {})
    ledgers = [s["ledger"] for s in last]
    counters = {reason: sum(ledger["counters"][reason] for ledger in ledgers) if rank == 0 else 0 for reason in ledgers[0]["counters"]}
    ledger = {"epoch": epoch, "delivered": sum(ledger["delivered"] for ledger in ledgers), "skipped": 0, "counters": counters}
    header = {key: last[0][key] for key in ("kind", "seed", "utterances")}
    header |= {"world": world, "rank": rank, "ledger": ledger, "epoch": epoch}
    if last[0]["kind"] == "digits":
        used = max(s["index"] * s["world"] for s in last)
        return header | {"index": -(-used // world), "batch": max(s["batch"] for s in last)}
    return header | {"position": 0, "pending": [], "before": [*before, last]}


def _epoch_plans(source: Source, order: Sequence[int] | np.ndarray, rows: Sequence[RowSize], cfg: DataConfig, epoch: int, position: int,
                 pending: list[int]) -> Iterator[Plan]:
    window = [(place, source.item(int(order[place]))) for place in pending]
    dropped: list[UtteranceError] = []
    while window or position < len(order):
        while len(window) < 2 * rows[-1].utterances and position < len(order):
            try:
                window.append((position, _fitting(source.item(int(order[position])), rows[-1])))
            except UtteranceError as error:
                dropped.append(settle(error, getattr(cfg, f"on_{error.reason}")))
            position += 1
        taken, row = take([item.load for _, item in window], rows)
        chosen, items = set(taken), tuple(window[i][1] for i in taken)
        window = [entry for i, entry in enumerate(window) if i not in chosen]
        yield Plan(items, row, tuple(dropped), {"epoch": epoch, "position": position, "pending": [place for place, _ in window]})
        dropped = []


def finite_plans(source: Source, rows: Sequence[RowSize], cfg: DataConfig, rank: int, world: int) -> list[Plan]:
    """Plans of one pass in order for one rank: each utterance once over all ranks, the same number and the largest size of row on each."""
    plans = list(_epoch_plans(source, range(len(source)), rows[-1:], cfg, 0, 0, []))
    plans += [Plan((), rows[-1], (), {})] * (-len(plans) % world)
    return plans[rank::world]


def take(loads: Sequence[Load], rows: Sequence[RowSize], in_order: bool = False) -> tuple[list[int], RowSize]:
    """Greedily fills the largest row, oldest first, and returns who goes in and the smallest row that holds them.

    in_order stops at the first that does not fit, instead of trying those behind it.
    """
    taken, total = [], Load()
    for i, load in enumerate(loads):
        if not (total + load).excess(rows[-1]):
            taken.append(i)
            total += load
        elif in_order:
            break
    return taken, next(row for row in rows if not total.excess(row))


def _fitting(item: Item, largest: RowSize) -> Item:
    excess = item.load.excess(largest)
    if excess and isinstance(item.audio, Utterance):
        raise item.audio.fault("too_long", f"{item.audio.duration_sec:.1f} s of audio and {len(item.answer)} tokens of text do not fit the "
                                           f"largest of data.rows ({excess})")
    return item
