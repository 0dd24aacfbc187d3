"""Collectives of a step that is one graph: the compiler's passes, which know a GPU's rates alone, on the graph that is captured here."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import GraphModule

from data.packing import pack_row
from parallel import mesh
from perf.planning.trace import own_group, processes
from training import config
from training.step import make_engine, make_gradients, make_state, scheduled

TEXT = ("+experiment=digits", "compile.scope=step", "precision=fp32", "model.encoder=null", "train.ctc_weight=0", "data.kind=text",
        "data.manifest=none", "model.decoder.pattern=*-", "data.rows=[{tokens: 32, audio_frames: 0, utterances: 2}]")


def test_the_compiler_takes_the_options_where_there_is_a_gpu() -> None:
    assert scheduled(torch.device("cpu")) is None
    options = scheduled(torch.device("cuda"))
    assert options is not None
    with torch._inductor.config.patch(options):
        assert torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling
    assert not torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling


@pytest.fixture
def forward(no_processes: None) -> Iterator[GraphModule]:
    """The graph of a pass of one of two ranks, whose collectives send nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    cfg, _ = config.load(TEXT)
    row = pack_row([], cfg.data.rows[0])
    with processes(2):
        compiled = functools.partial(torch.compile, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        with mock.patch.object(mesh, "_group_of", own_group), mock.patch.object(torch, "compile", compiled):
            places = mesh.make_mesh(cfg.parallel, torch.device("cpu"))
            batch = {name: torch.from_numpy(value) for name, value in row.items()}
            make_gradients(cfg, places, make_engine(cfg, places))(make_state(cfg, places), [batch])
        yield graphs[0]


def beside(graph: GraphModule) -> list[int]:
    """How many products lie between the start of each collective and its end."""
    products, started, found = 0, dict[Any, int](), list[int]()
    for node in graph.graph.nodes:
        if "wait_tensor" in str(node.target):
            found.append(products - started[node.args[0]])
        elif "_c10d_functional" in str(node.target):
            started[node] = products
        products += "mm" in str(node.target) or "reedling" in str(node.target)
    return found


def test_gathers_of_a_step_start_before_the_products_that_they_run_beside(forward: GraphModule) -> None:
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
    from torch.utils import _runtime_estimation

    def milliseconds(node: Any, *sizes: Any) -> float:
        return 1.0 if "_c10d_functional" in str(node.target) else 0.5 if "mm" in str(node.target) else 0.01

    before = beside(forward)
    assert len(before) >= 4  # embedding, two layers, head
    assert not any(before)
    with mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", return_value=3350.0):
        after = beside(schedule_overlap_bucketing(forward, insert_overlap_deps=False, collective_bucketing=False,
                                                  custom_runtime_estimation=milliseconds))
    assert len(after) == len(before)
    assert sum(count > 0 for count in after) >= len(before) - 2
