"""In which order each rank of a pipeline computes: pure functions, so that ranks agree because they compute the same.

A backward is one action or two, the gradients of a stage's inputs, which the stage before waits for, and those of its weights, which nobody
waits for and which fill the time that a rank would wait otherwise (Qi et al. 2023, arXiv:2401.10241). A row of the step is what travels.
"""

from collections import Counter
from collections.abc import Sequence

from parallel.pipeline import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, compute

LOOPED = ("interleaved_1f1b", "looped_bfs")  # have two or more stages a rank
V_SHAPED = ("zbv", "dualpipev")  # have two stages a rank, the first and the last of them all on one
APART = ("zero_bubble", *V_SHAPED)  # compute gradients of inputs and of weights apart
BY_ROUNDS = ("interleaved_1f1b", "zero_bubble")  # take the rows in equal rounds


def placement(schedule: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage: round and round the ranks, or down and up again."""
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * chunks)]


def orders(schedule: str, ranks: int, chunks: int, rows: int) -> list[list[Action]]:
    """What each rank computes, in order: each of its `chunks` stages forward and backward for every row.

    gpipe: all rows forward, then all backward. 1f1b: after a warm-up one of each in turn. interleaved_1f1b: the same, a round of rows
    through each of the rank's stages in turn. looped_bfs: all rows through one stage, then through the next. zero_bubble: interleaved_1f1b
    with a shorter warm-up, whose gradients of weights come later the more ranks lie before; ZB1P of the paper. zbv, dualpipev: one stage of
    a rank on the way down and one on the way up.
    """
    if schedule == "1f1b":
        return [_alternating(rank, ranks, 1, rows, rows, ranks - 1 - rank) for rank in range(ranks)]
    if schedule in BY_ROUNDS:
        a_round, hop = rows // rounds(ranks, rows), 1 if schedule in APART else 2
        warm_ups = [(chunks - 1) * a_round + hop * (ranks - 1 - rank) for rank in range(ranks)]
        whole = [_alternating(rank, ranks, chunks, rows, a_round, warm_up) for rank, warm_up in enumerate(warm_ups)]
        return whole if schedule not in APART else [_apart(order, rank) for rank, order in enumerate(whole)]
    if schedule in V_SHAPED:
        in_a_v = {"zbv": _zbv, "dualpipev": _dualpipev}[schedule]
        return [in_a_v(rank, ranks, rows) for rank in range(ranks)]
    back = range(rows) if schedule == "gpipe" else range(rows - 1, -1, -1)
    return [_all_forward_first(range(rank, ranks * chunks, ranks), back) for rank in range(ranks)]


def rounds(ranks: int, rows: int) -> int:
    """In how many equal rounds some schedules take the rows; they must divide the rows."""
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


def _apart(order: Sequence[Action], delay: int) -> list[Action]:
    """Backwards in two: gradients of inputs where the whole was, those of weights `delay` backwards later."""
    found: list[Action] = []
    later: list[Action] = []
    for action in order:
        if action.kind == BACKWARD:
            later.append(compute(WEIGHTS, action.stage, action.row))
            action = compute(INPUTS, action.stage, action.row)
        found.append(action)
        if len(later) > delay:
            found.append(later.pop(0))
    return found + later


class _Order:
    """A rank's order as it is written down: every kind takes the rows in turn."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.later: list[Action] = []  # gradients of weights whose inputs' are there
        self.rows: Counter[tuple[str, int]] = Counter()

    def add(self, stage: int, *kinds: str) -> None:
        """The next row of a stage, for each kind."""
        for kind in kinds:
            if kind == WEIGHTS:
                self.weights(stage)
                continue
            counted = FORWARD if kind == FORWARD else BACKWARD, stage
            self.actions.append(compute(kind, stage, self.rows[counted]))
            if kind == INPUTS:
                self.later.append(compute(WEIGHTS, stage, self.rows[counted]))
            self.rows[counted] += 1

    def weights(self, stage: int | None = None) -> None:
        """The oldest gradients of weights that are still to come, of that stage or of any; nothing where there are none."""
        oldest = next((action for action in self.later if stage in (None, action.stage)), None)
        if oldest is not None:
            self.later.remove(oldest)
            self.actions.append(oldest)


def _zbv(rank: int, ranks: int, rows: int) -> list[Action]:
    """ZBV of Qi et al. 2024 (arXiv:2405.15362): as if there were rows enough to fill the pipeline."""
    down, up, order, total = rank, 2 * ranks - 1 - rank, _Order(), max(rows, 2 * ranks - 1)
    for _ in range(2 * (ranks - rank) - 1):
        order.add(down, FORWARD)
    for _ in range(rank):
        order.add(up, FORWARD)
        order.add(down, FORWARD)
    for _ in range(ranks - rank):
        order.add(up, FORWARD, INPUTS, WEIGHTS)
    while order.rows[FORWARD, up] < total:
        if order.rows[FORWARD, down] < total:
            order.add(down, FORWARD)
        order.add(down, INPUTS, WEIGHTS)
        order.add(up, FORWARD, INPUTS, WEIGHTS)
    for _ in range(rank):
        order.add(down, INPUTS)
        order.add(up, INPUTS)
    for _ in range(ranks - rank):
        order.add(down, INPUTS, WEIGHTS)
    for stage in (up, down):
        while any(action.stage == stage for action in order.later):
            order.weights(stage)
    return [action for action in order.actions if action.row < rows]


def _dualpipev(rank: int, ranks: int, rows: int) -> list[Action]:
    """DualPipe (DeepSeek-AI 2024, arXiv:2412.19437) folded into a V; needs as many rows as stages."""
    down, up, order, before = rank, 2 * ranks - 1 - rank, _Order(), ranks - rank - 1
    for _ in range(2 * before):
        order.add(down, FORWARD)
    for _ in range(rank + 1):
        order.add(down, FORWARD)
        order.add(up, FORWARD)
    for _ in range(before):
        order.add(up, INPUTS)
        order.weights()
        order.add(up, FORWARD)
    for _ in range(rows - 2 * ranks + rank + 1):
        order.add(down, FORWARD)
        order.add(up, BACKWARD, FORWARD)
        order.add(down, BACKWARD)
    for _ in range(before):
        order.add(up, BACKWARD, FORWARD)
        order.add(down, BACKWARD)
    for number in range(2 * (rank + 1)):
        order.add(down if number % 2 else up, BACKWARD if number <= rank else INPUTS)
    for _ in range(before):
        order.weights()
        order.add(down, INPUTS)
    for _ in range(rank + 1):
        order.weights()
    return order.actions
