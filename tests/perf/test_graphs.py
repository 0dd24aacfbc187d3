"""What `python -m perf graphs` counts."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perf.graphs import good
from perf.graphs_worker import REDUCED, host_reads, timeline

SOUND: dict[str, Any] = {"breaks": 0, "recompiles": 0, "host_syncs": 0, "expert_layers": 2, "collectives_per_layer": 2.8,
                         "collectives_in_graphs": {"mamba.forward": {"forward": 2, "backward": 2}}}


@torch.library.custom_op("reedling_test::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    return x * len(x.tolist()) if x.sum() > 0 else x.clone()


def test_reads_of_the_host_are_counted_inside_operators_too() -> None:
    x = torch.ones(3)
    with host_reads() as counts:
        reads(x)  # a comparison and a list
        x.nonzero()
        float(x[0])
        torch.testing.assert_close(x, x)  # reads on behalf of a library of this process are its caller's
    here = "tests/perf/test_graphs.py"
    assert counts[f"{here}: reads"] == 2
    assert counts[f"{here}: test_reads_of_the_host_are_counted_inside_operators_too"] >= 2
    before = counts.total()
    reads(x)
    assert counts.total() == before


def event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_order_of_a_step() -> None:
    found = timeline([
        event("_c10d_functional::all_gather_into_tensor", 0, 1), event("_c10d_functional::wait_tensor", 1, 2),
        event("_c10d_functional::all_gather_into_tensor", 2, 3), event("graph: a, forward", 3, 9),
        event("_c10d_functional::all_to_all_single", 4, 5), event("_c10d_functional::wait_tensor", 5, 6),  # inside the graph
        event("aten::mm", 6, 7), event("_c10d_functional::wait_tensor", 10, 11), event("graph: b, backward", 11, 12),
        event("_c10d_functional::reduce_scatter_tensor", 12, 13), event("graph: a, backward", 13, 14), event(REDUCED, 14, 16),
        event("_c10d_functional::wait_tensor", 15, 16), event("_c10d_functional::all_reduce_", 16, 17), event(REDUCED, 17, 18)])
    assert found == [("all_gather", 1, 0), ("all_gather", 1, 0), ("graph: a, forward", 1, 0), ("graph: b, backward", 0, 0),
                     ("reduce_scatter", 0, 1), ("graph: a, backward", 0, 1), ("all_reduce", 0, 1)]


@pytest.mark.parametrize(("name", "changes", "expected"), [
    ("dp", {}, True), ("dp", {"breaks": 1}, False), ("dp", {"recompiles": 1}, False), ("dp", {"host_syncs": 1}, False),
    ("dp", {"collectives_per_layer": 3.1}, False), ("hsdp", {"collectives_per_layer": 3.7}, True), ("ep_alltoall", {}, False),
    ("ep_alltoall", {"host_syncs": 2}, True), ("ep_allgather", {"host_syncs": 2}, False),
    ("cp", {"collectives_in_graphs": {"mamba.forward": {"forward": 2, "backward": 3}}}, False),
])
def test_bars(name: str, changes: dict[str, Any], expected: bool) -> None:
    assert good(name, copy.deepcopy(SOUND) | changes) is expected
