"""A part of the matrix of layouts against one process, in double precision; `python -m tests.dist.matrix` runs all of it."""

from typing import Any

import pytest

from tests.dist.cells import cells
from tests.dist.matrix import BARS, COLUMNS, failed, measure, summary, table

QUICK = [cell for cell in cells() if cell.quick]
UNITS = 10  # subsampling, 1 encoder layer, CTC head, projector, embedding, 4 decoder layers, head
AGAIN = 8  # gathered again in backward: all but the head, which comes first, and the embedding, whose backward reads no weight


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return measure(QUICK, "fp64")


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: cell.name)
def test_equals_one_process(results: dict[str, dict[str, Any]], cell: Any) -> None:
    assert not failed(results[cell.name], "fp64"), results[cell.name]


@pytest.mark.parametrize(("name", "gathers", "scatters", "reduces"), [  # of a step of two rows
    ("dp 4, zero 0", 0, 0, UNITS),  # gradients once a step
    ("dp 4, zero 1", UNITS, UNITS, 0),  # weights and gradients once a step
    ("dp 4, zero 2", UNITS, 2 * UNITS, 0),  # gradients once a row
    ("dp 4, weights kept after forward", 2 * (UNITS + 2), 2 * (UNITS + 1), 0),  # experts, of one layer, have a buffer of their own
    ("dp 4, experts' weights kept", 2 * (UNITS + 1 + AGAIN), 2 * (UNITS + 1), 0),
    ("dp 4, gradients reduced once", 2 * (UNITS + AGAIN), UNITS, 0),
    ("hsdp 2 x 2", UNITS + AGAIN, UNITS, UNITS),
])
def test_collectives_of_a_step(results: dict[str, dict[str, Any]], name: str, gathers: int, scatters: int, reduces: int) -> None:
    counts = results[name]["collectives"]
    assert counts.get("all_gather_into_tensor", 0) == gathers
    assert counts.get("reduce_scatter_tensor", 0) == scatters
    assert counts.get("all_reduce", 0) == reduces


def test_mamba_exchanges_twice_in_forward_and_twice_in_backward(results: dict[str, dict[str, Any]]) -> None:
    counts = results["cp 2, tp 2"]["collectives"]  # of two rows and one such layer
    assert counts["all_to_all_single"] == 2 * (2 + 2)


def test_summary_names_what_failed() -> None:
    good = dict.fromkeys(BARS["fp32"], 0.0)
    found = summary({"a": good, "b": good | {"norm_error": float("nan")}, "c": {"failure": "x"}, "d": good | {"loss_error": 2e-6}}, "fp32")
    assert found["cells"] == 4
    assert found["failed"] == ["b", "c", "d"]
    assert found["max_loss_error"] == 2e-6


def test_the_table_keeps_rows_that_were_not_measured() -> None:
    names = [cell.name for cell in cells()[:3]]
    good = dict.fromkeys(BARS["fp32"], 1e-12)
    rows = table("", {names[0]: good, names[1]: good}, "fp32", "inductor")
    rows = table(rows, {names[1]: good | {"loss_error": 2e-10}, names[2]: {"failure": "x"}}, "fp64", "inductor")
    assert rows.splitlines() == [
        f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|---|---|---|",
        f"| {names[0]} | 2 | eager | 1.0e-12 | 1.0e-12 | 1.0e-12 | 1.0e-12 | - |",
        f"| {names[1]} | 2 | eager | 1.0e-12 | 1.0e-12 | 1.0e-12 | 1.0e-12 | 2.0e-10 |"]
