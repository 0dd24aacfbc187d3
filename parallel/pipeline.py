"""Pipeline parallelism without any tensor: where the layers are cut, when a rank sends and receives, how long it waits.

A stage is a contiguous part of the model. Which rank has it, and in which order ranks compute, is the schedule's (parallel/schedules.py);
with several stages a rank a row passes each rank several times. Every function here is pure: ranks agree because they compute the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
INPUTS, WEIGHTS = "inputs", "weights"  # a backward in two: gradients of a stage's inputs, and then those of its weights


@dataclass(frozen=True)
class Stage:
    """One part of the model."""

    index: int
    layers: range  # of the decoder
    enters: bool = True  # has what comes before the layers: encoder, projector, embedding
    ends: bool = True  # has what comes behind them: the head
    learns_before: bool = False  # whether an earlier stage has trained parameters, so that the gradient of this one's input is wanted


class Action(NamedTuple):
    """What a rank does next: compute a stage's part of a row, or let the result travel."""

    kind: str  # forward | backward | inputs | weights | send | receive
    way: str  # forward | backward
    stage: int  # that computes, that has computed what is sent, or that is going to use what is received
    row: int

    @property
    def message(self) -> tuple[str, int, int]:
        """What names the hidden states, or their gradients, that this is about."""
        return self[1:]


def compute(kind: str, stage: int, row: int) -> Action:
    """The computation of a stage's forward or backward part of a row, the latter whole or one of its two."""
    return Action(kind, FORWARD if kind == FORWARD else BACKWARD, stage, row)


def cut(costs: Sequence[float], stages: int, entry: float = 0.0, head: float = 0.0) -> list[int]:
    """Where each stage's layers end, so that the dearest stage is as cheap as can be, and then the sum of squares small.

    The first stage also has `entry` and the last `head`; these two may have no layer, the others have at least one.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # layers so far -> dearest, squares, ends
    for stage in range(stages):
        extra, least = entry * (stage == 0) + head * (stage == stages - 1), 0 if stage in (0, stages - 1) else 1
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(len(costs) + 1) if stage < stages - 1 else (len(costs),):
            options = []
            for start, (dearest, squares, ends) in best.items():
                if start + least <= end:
                    own = before[end] - before[start] + extra
                    options.append((max(dearest, own), squares + own * own, (*ends, end)))
            if options:
                found[end] = min(options)
        best = found
    return list(best[len(costs)][2])


def with_transfers(computed: Sequence[Sequence[Action]], places: Sequence[int]) -> list[list[Action]]:
    """The orders of all ranks with what they send and receive, in one order over all of them.

    Whenever a stage has computed what another rank needs, the sender's list gets a send and the receiver's at once its receive: any two
    ranks name their transfers in the same order, and no rank waits for one that waits for it. What stays on its rank does not travel.

    :param places: the rank of each stage
    """
    lists: list[list[Action]] = [[] for _ in computed]
    left = [list(reversed(order)) for order in computed]
    there: set[tuple[str, int, int]] = set()  # what has come to its stage
    while any(left):
        progress = False
        for rank in range(len(computed)):
            if left[rank] and (_needs_nothing(left[rank][-1], len(places)) or left[rank][-1].message in there):
                action, progress = left[rank].pop(), True
                lists[rank].append(action)
                receiver = next_stage(action)
                if action.kind != WEIGHTS and 0 <= receiver < len(places):
                    there.add((action.way, receiver, action.row))
                    if places[receiver] != rank:
                        lists[rank].append(Action("send", *action.message))
                        lists[places[receiver]].append(Action("receive", action.way, receiver, action.row))
        if not progress:
            raise ValueError(f"the order of the stages waits for itself at {[order[-1] for order in left if order]}")
    return lists


def next_stage(action: Action) -> int:
    """Where the result of a computation, or of what is sent, goes."""
    return action.stage + (1 if action.way == FORWARD else -1)


def _needs_nothing(action: Action, stages: int) -> bool:
    """Whether it waits for no other stage; its own rank has computed before what it needs of its own."""
    return action.kind == WEIGHTS or action.stage == (0 if action.way == FORWARD else stages - 1)


def idle_share(computed: Sequence[Sequence[Action]], stages: int, backward: float = 2.0, costs: Sequence[float] | None = None) -> float:
    """Which share of the time the ranks wait, when a forward of a stage takes its cost and a backward `backward` times as long, of which
    the gradients of inputs take as long as a forward."""
    costs, times = costs or [1.0] * stages, {FORWARD: 1.0, BACKWARD: backward, INPUTS: 1.0, WEIGHTS: backward - 1.0}

    def lasts(action: Action) -> float:
        return costs[action.stage] * times[action.kind]

    finished: dict[tuple[str, int, int], float] = {}
    clocks, positions = [0.0] * len(computed), [0] * len(computed)
    while any(position < len(order) for position, order in zip(positions, computed, strict=True)):
        for rank, order in enumerate(computed):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                source = action.way, action.stage - (1 if action.way == FORWARD else -1), action.row
                if not _needs_nothing(action, stages) and source not in finished:
                    break
                clocks[rank] = max(clocks[rank], finished.get(source, 0.0)) + lasts(action)
                if action.kind != WEIGHTS:
                    finished[action.message] = clocks[rank]
                positions[rank] += 1
    return 1 - sum(lasts(action) for order in computed for action in order) / (len(computed) * max(clocks))


def most_live(order: Sequence[Action]) -> int:
    """The largest number of (stage, row) that a rank holds at a time between forward and the end of backward."""
    live = most = 0
    for action in order:
        live += {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}.get(action.kind, 0)
        most = max(most, live)
    return most
