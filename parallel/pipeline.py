"""Pipeline parallelism without any tensor: where the layers are cut, in which order a rank computes, when it sends and receives.

A stage is a contiguous part of the model; stage s lives on rank s modulo the number of ranks, so that with several stages a rank a row
passes each rank several times. A row of the step is what travels. Every function here is pure: ranks agree because they compute the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


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

    kind: str  # forward | backward | send | receive
    way: str  # forward | backward
    stage: int  # that computes, that has computed what is sent, or that is going to use what is received
    row: int


def compute(way: str, stage: int, row: int) -> Action:
    """The computation of a stage's forward or backward part of a row."""
    return Action(way, way, stage, row)


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


def orders(schedule: str, ranks: int, chunks: int, rows: int) -> list[list[Action]]:
    """What each rank computes, in order: each of its `chunks` stages forward and backward for every row.

    gpipe: all rows forward, then all backward. 1f1b: after a warm-up one of each in turn. interleaved_1f1b: the same, a round of rows
    through each of the rank's stages in turn. looped_bfs: all rows through one stage, then through the next.
    """
    if schedule == "1f1b":
        return [_alternating(rank, ranks, 1, rows, rows, ranks - 1 - rank) for rank in range(ranks)]
    if schedule == "interleaved_1f1b":
        a_round = rows // rounds(ranks, rows)
        warm_ups = [(chunks - 1) * a_round + 2 * (ranks - 1 - rank) for rank in range(ranks)]
        return [_alternating(rank, ranks, chunks, rows, a_round, warm_up) for rank, warm_up in enumerate(warm_ups)]
    back = range(rows) if schedule == "gpipe" else range(rows - 1, -1, -1)
    return [_all_forward_first(range(rank, ranks * chunks, ranks), back) for rank in range(ranks)]


def rounds(ranks: int, rows: int) -> int:
    """In how many equal rounds interleaved_1f1b takes the rows; they must divide the rows."""
    return max(1, rows // ranks)


def _all_forward_first(stages: Sequence[int], back: Sequence[int]) -> list[Action]:
    forward = [compute(FORWARD, stage, row) for stage in stages for row in range(len(back))]
    return forward + [compute(BACKWARD, stage, row) for stage in reversed(stages) for row in back]


def _alternating(rank: int, ranks: int, chunks: int, rows: int, a_round: int, warm_up: int) -> list[Action]:
    """Forwards alone, then one forward and one backward in turn, then backwards alone; `a_round` rows before another chunk has its turn."""
    total = chunks * rows
    passes = []
    for way in (FORWARD, BACKWARD):
        done = dict.fromkeys(range(chunks), 0)
        sequence = []
        for number in range(total):
            chunk = number // a_round % chunks
            chunk = chunk if way == FORWARD else chunks - 1 - chunk
            sequence.append(compute(way, rank + chunk * ranks, done[chunk]))
            done[chunk] += 1
        passes.append(sequence)
    forward, backward = passes
    warm_up = min(warm_up, total)
    mixed = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
    return forward[:warm_up] + mixed + backward[total - warm_up :]


def with_transfers(computed: Sequence[Sequence[Action]], stages: int) -> list[list[Action]]:
    """The orders of all ranks with what they send and receive, in one order over all of them.

    Whenever a stage has computed what another rank needs, the sender's list gets a send and the receiver's at once its receive: any two
    ranks name their transfers in the same order, and no rank waits for one that waits for it.
    """
    ranks = len(computed)
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    left = [list(reversed(order)) for order in computed]
    there: set[Action] = set()  # computations that have all they need from other stages
    while any(left):
        progress = False
        for rank in range(ranks):
            if left[rank] and (_needs_nothing(left[rank][-1], stages) or left[rank][-1] in there):
                action, progress = left[rank].pop(), True
                lists[rank].append(action)
                receiver = next_stage(action)
                if 0 <= receiver < stages:
                    there.add(compute(action.way, receiver, action.row))
                    lists[rank].append(Action("send", action.way, action.stage, action.row))
                    lists[receiver % ranks].append(Action("receive", action.way, receiver, action.row))
        if not progress:
            raise ValueError(f"the order of the stages waits for itself at {[order[-1] for order in left if order]}")
    return lists


def next_stage(action: Action) -> int:
    """Where the result of a computation, or of what is sent, goes."""
    return action.stage + (1 if action.way == FORWARD else -1)


def _needs_nothing(action: Action, stages: int) -> bool:
    return action.stage == (0 if action.way == FORWARD else stages - 1)


def idle_share(computed: Sequence[Sequence[Action]], stages: int, backward: float = 2.0, costs: Sequence[float] | None = None) -> float:
    """Which share of the time the ranks wait, when a forward of a stage takes its cost and a backward `backward` times as long."""
    costs = costs or [1.0] * stages

    def lasts(action: Action) -> float:
        return costs[action.stage] * (backward if action.way == BACKWARD else 1.0)

    finished: dict[Action, float] = {}
    clocks, positions = [0.0] * len(computed), [0] * len(computed)
    while any(position < len(order) for position, order in zip(positions, computed, strict=True)):
        for rank, order in enumerate(computed):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                source = compute(action.way, action.stage - (1 if action.way == FORWARD else -1), action.row)
                if not _needs_nothing(action, stages) and source not in finished:
                    break
                clocks[rank] = max(clocks[rank], finished.get(source, 0.0)) + lasts(action)
                finished[action] = clocks[rank]
                positions[rank] += 1
    return 1 - sum(lasts(action) for order in computed for action in order) / (len(computed) * max(clocks))


def most_live(order: Sequence[Action]) -> int:
    """The largest number of (stage, row) that a rank holds at a time between forward and backward."""
    live = most = 0
    for action in order:
        live += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
        most = max(most, live)
    return most
