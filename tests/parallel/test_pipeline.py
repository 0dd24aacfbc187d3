"""Orders of a pipeline against torch's own and against closed forms; transfers that meet; where the layers are cut."""

import itertools
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from parallel.names import SCHEDULES, schedule
from parallel.pipeline import Action, compute, cut, idle_share, most_live, next_stage, with_transfers
from parallel.schedules import V_SHAPED, orders, placement

CASES = [(name, ranks, chunks, rows)
         for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("looped_bfs", 2),
                              ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))
         for ranks, rows in ((2, 1), (2, 2), (2, 6), (3, 3), (4, 2), (4, 8), (4, 12))]
CASES += [("dualpipev", ranks, 2, rows) for ranks, rows in ((2, 4), (2, 5), (3, 6), (4, 8), (4, 12), (5, 16))]
CLASSES = {"gpipe": schedules.ScheduleGPipe, "looped_bfs": schedules.ScheduleLoopedBFS, "zbv": schedules.ScheduleZBVZeroBubble,
           "zero_bubble": schedules.ScheduleInterleavedZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}
KINDS = {schedules.FORWARD: "forward", schedules.FULL_BACKWARD: "backward", schedules.BACKWARD_INPUT: "inputs",
         schedules.BACKWARD_WEIGHT: "weights"}


def of_torch(name: str, rank: int, ranks: int, chunks: int, rows: int) -> list[Action]:
    """The same order from torch.distributed.pipelining, whose classes otherwise want modules and process groups."""
    kind: Any = CLASSES.get(name, schedules.ScheduleInterleaved1F1B)
    made = object.__new__(kind)
    made._num_stages = made.pp_group_size = ranks
    made._stages, made.n_local_stages, made._n_microbatches = [None] * chunks, chunks, rows
    made.microbatches_per_round = rows // max(1, rows // ranks)
    if name == "zbv":  # which counts all stages
        made.num_stages = ranks * chunks
    if name == "1f1b":  # the order that its class prints numbers the rows of the last rank from 1
        warm_up = min(rows, ranks - 1 - rank)
        found = schedules._get_1f1b_rank_ops(1, ranks, warm_up, rows - warm_up, warm_up, rank, lambda step: rank, lambda step: rank)
    else:
        found = made._get_pipeline_order()[rank] if name == "gpipe" else made._calculate_single_rank_operations(rank)
    parts = [part for a in found if a for part in a.sub_actions or (a,)]  # a forward beside a backward, in turn
    return [compute(KINDS[a.computation_type], a.stage_index, a.microbatch_index) for a in parts if a.computation_type in KINDS]


@pytest.mark.parametrize(("name", "ranks", "chunks", "rows"), CASES)
def test_orders_are_those_of_torch(name: str, ranks: int, chunks: int, rows: int) -> None:
    assert orders(name, ranks, chunks, rows) == [of_torch(name, rank, ranks, chunks, rows) for rank in range(ranks)]


@pytest.mark.parametrize(("name", "ranks", "chunks", "rows"), CASES)
def test_every_stage_computes_every_row_once_in_each_direction(name: str, ranks: int, chunks: int, rows: int) -> None:
    places = placement(name, ranks, chunks)
    assert len(places) == ranks * chunks
    for rank, order in enumerate(orders(name, ranks, chunks, rows)):
        halves = [a for a in order if a.kind in ("inputs", "weights")]
        whole = [a for a in order if a not in halves] + [compute("backward", *a[2:]) for a in halves if a.kind == "inputs"]
        assert sorted(whole) == sorted(compute(way, stage, row) for way in ("forward", "backward")
                                       for stage in range(ranks * chunks) if places[stage] == rank for row in range(rows))
        assert sorted(a[2:] for a in halves if a.kind == "inputs") == sorted(a[2:] for a in halves if a.kind == "weights")
        at = {(a.kind, a.stage, a.row): number for number, a in enumerate(order)}
        for kind, stage, row in at:
            before = {"backward": "forward", "inputs": "forward", "weights": "inputs"}.get(kind)
            assert before is None or at[before, stage, row] < at[kind, stage, row]


@pytest.mark.parametrize(("name", "ranks", "chunks", "rows"), CASES)
def test_transfers_meet_without_waiting_for_each_other(name: str, ranks: int, chunks: int, rows: int) -> None:
    places, last = placement(name, ranks, chunks), ranks * chunks - 1
    lists = with_transfers(orders(name, ranks, chunks, rows), places)
    assert [[a for a in full if a.kind not in ("send", "receive")] for full in lists] == orders(name, ranks, chunks, rows)
    left, there = [list(full) for full in lists], set[tuple[Any, ...]]()
    while any(left):  # a message passes only when both ends are at it, the strictest that a library may demand
        before = sum(map(len, left))
        for rank, full in enumerate(left):
            while full and full[0].kind not in ("send", "receive"):
                action = full.pop(0)
                way, stage, row = action.message
                assert action.kind == "weights" or stage == (0 if way == "forward" else last) or (way, stage, row) in there
                onward = next_stage(action)
                if action.kind != "weights" and 0 <= onward <= last and places[onward] == rank:
                    there.add((way, onward, row))  # without a message
            if full and full[0].kind == "send":
                stage = next_stage(full[0])
                other = left[places[stage]]
                if other and other[0] == Action("receive", full[0].way, stage, full[0].row):
                    there.add(other.pop(0).message)
                    full.pop(0)
        assert sum(map(len, left)) < before, [full[0] for full in left if full]


def test_a_v_has_both_ends_on_one_rank() -> None:
    assert [placement(name, 3, 2) for name in V_SHAPED] == [[0, 1, 2, 2, 1, 0]] * 2
    assert placement("zero_bubble", 3, 2) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_halves_of_a_backward_fill_two_thirds_of_the_time_that_ranks_wait(ranks: int, rows: int) -> None:
    """Where a forward, and either half of a backward, take as long: (ranks - 1)(F + I - W) beside rows (F + I + W), as Qi et al. 2023 have
    it of ZB1P in their table 2."""
    for name, chunks in (("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)):
        computed = orders(name, ranks, chunks, rows)
        assert idle_share(computed, ranks * chunks) == pytest.approx((ranks - 1) / (3 * chunks * rows + ranks - 1))
        assert [most_live(order) for order in computed] == [chunks * ranks + (name == "dualpipev")] * ranks
    assert idle_share(orders("1f1b", ranks, 1, rows), ranks) == pytest.approx(3 * (ranks - 1) / (3 * rows + 3 * (ranks - 1)))


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (2, 2), (2, 8), (4, 4), (4, 16), (8, 24)])
def test_idle_share_and_rows_held_are_the_closed_forms(ranks: int, rows: int) -> None:
    expected = (ranks - 1) / (rows + ranks - 1)
    for name in ("gpipe", "1f1b"):
        assert idle_share(orders(name, ranks, 1, rows), ranks) == pytest.approx(expected)
    assert [most_live(order) for order in orders("1f1b", ranks, 1, rows)] == [min(rows, ranks - rank) for rank in range(ranks)]
    assert [most_live(order) for order in orders("gpipe", ranks, 1, rows)] == [rows] * ranks


@pytest.mark.parametrize(("ranks", "chunks", "rows"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 16), (8, 2, 24)])
def test_more_stages_a_rank_wait_less(ranks: int, chunks: int, rows: int) -> None:
    """Narayanan et al. 2021: (ranks - 1) / (chunks rows + ranks - 1) of the time."""
    computed = orders("interleaved_1f1b", ranks, chunks, rows)
    assert idle_share(computed, ranks * chunks) == pytest.approx((ranks - 1) / (chunks * rows + ranks - 1))
    held = [min(chunks * rows, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1) for rank in range(ranks)]
    assert [most_live(order) for order in computed] == held


def test_a_dear_stage_makes_the_others_wait() -> None:
    computed = orders("1f1b", 2, 1, 4)
    # rank 1 takes 3 times as long: forward 3, backward 6, four rows, behind one forward of rank 0 and before one backward of it
    assert idle_share(computed, 2, costs=[1.0, 3.0]) == pytest.approx(1 - (4 * 3 + 4 * 9) / (2 * (1 + 36 + 2)))


def test_the_cut_is_the_best_of_all() -> None:
    costs, entry, head = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], 4.0, 2.5
    for stages in (2, 3, 4):
        found = []
        for ends in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1):
            bounds = [0, *ends, len(costs)]
            own = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            own[0], own[-1] = own[0] + entry, own[-1] + head
            if all(b > a for a, b in itertools.pairwise(bounds[1:-1])):
                found.append((max(own), bounds[1:]))
        chosen = cut(costs, stages, entry, head)
        assert min(found)[0] == next(dearest for dearest, other in found if other == chosen)


def test_the_ends_may_be_without_layers_and_nothing_else() -> None:
    assert cut([1.0, 1.0], 4, entry=100.0, head=100.0) == [0, 1, 2, 2]
    assert cut([1.0] * 8, 4) == [2, 4, 6, 8]


def test_an_order_that_waits_for_itself_is_an_error() -> None:
    wrong = [[compute("backward", 0, 0), compute("forward", 0, 0)], [compute("forward", 1, 0), compute("backward", 1, 0)]]
    with pytest.raises(ValueError, match="waits for itself"):
        with_transfers(wrong, [0, 1])


@pytest.mark.parametrize(("name", "ours"), [*SCHEDULES.items(), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved_1f1b")])
def test_names_of_schedules(name: str, ours: str) -> None:
    assert schedule(name) == ours


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="^zigzag is no schedule of a pipeline; choose one of gpipe, 1f1b, .*, zbv, dualpipev$"):
        schedule("zigzag")
