"""What plan.py predicts: closed forms of small graphs, timelines and layouts; the whole is compared with runs by perf plan_check."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.validate import Environment, validate
from perf.cases import Work
from perf.planning import command, planner
from perf.planning.costs import Load
from perf.planning.graphs import Graph, Send, analyse
from perf.planning.machines import COPIES, LATENCY_SEC, LINKS, MACHINES, PRODUCTS
from perf.planning.timeline import bytes_by_axis, step_times
from perf.planning.trace import Begin, Trace, Wait, meeting
from training import config

H100 = MACHINES["h100"]
LOAD = Load(expert_rows=10, document_tokens=8, utterance_frames=8)
ROOT = Path(__file__).parents[2]


def test_a_graph_counts_products_and_one_pass_over_what_is_fused() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * 2 + 1  # one pass: reads x, writes h
        return (h @ w).relu().sum(1)  # one pass: reads the product, writes the sum

    graph = make_fx(layer, tracing_mode="fake")(torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16))
    found = analyse("layer", graph, LOAD)
    assert sorted((s.flops, s.bytes) for s in found.steps if isinstance(s, Work)) == [
        (0, 2 * (30 + 6)), (0, 2 * (24 + 24)), (2 * 6 * 4 * 5, 2 * (24 + 20 + 30))]
    assert found.transient_bytes == 2 * (24 + 30)  # h and the product at once


def traced(*events: object, ranks: int = 8, node: str = "shard") -> Trace:
    return Trace(events=list(events), groups={"g": (node, list(range(ranks)))})  # type: ignore[arg-type]


def test_a_collective_hides_behind_the_work_until_its_wait() -> None:
    size = 1 << 30
    sending = size * 7 / 8 / (LINKS * H100.link) + LATENCY_SEC
    work = Work(0.5 * sending * PRODUCTS * H100.flops, 0)
    times = step_times(traced(Begin(Send("all_gather", size, "g"), 1), work, Wait(1), work), H100)
    assert times.compute == pytest.approx(sending)
    assert times.exposed == pytest.approx(0.5 * sending)
    assert times.hidden == pytest.approx(0.5 * sending)
    inside = step_times(traced(Graph("layer", (work, Send("reduce_scatter", size, "g"), work), 0)), H100)
    assert (inside.exposed, inside.total) == (pytest.approx(sending), pytest.approx(2 * sending))


def test_a_group_sends_one_thing_after_the_other() -> None:
    size = 1 << 30
    one = size * 7 / 8 / (LINKS * H100.link) + LATENCY_SEC
    times = step_times(traced(Begin(Send("all_gather", size, "g"), 1), Begin(Send("all_gather", size, "g"), 2), Wait(1), Wait(2)), H100)
    assert times.total == pytest.approx(2 * one)


@pytest.mark.parametrize(("ranks", "seconds"), [
    ([0, 8], (1 << 29) / (LINKS * H100.network)),  # one a node: half of it comes through one network
    (list(range(16)), (1 << 30) * 15 / 16 / (LINKS * H100.link)),  # eight networks share what the other node has, and links are slower
    (list(range(0, 64, 4)), (1 << 30) * 7 / 8 / 2 / (LINKS * H100.network)),  # two a node
])
def test_links_or_the_network_decide(ranks: list[int], seconds: float) -> None:
    trace = Trace(events=[Begin(Send("all_gather", 1 << 30, "g"), 1), Wait(1)], groups={"g": ("shard", ranks)})
    assert step_times(trace, H100).total == pytest.approx(seconds + LATENCY_SEC)


def test_a_collective_that_nobody_waits_for_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="1 collectives that nobody waits for"):
        step_times(traced(Begin(Send("all_gather", 800, "g"), 1), Wait(2)), H100)


def test_memory_bounds_a_pass() -> None:
    assert step_times(traced(Work(1.0, 1e9)), H100).compute == pytest.approx(1e9 / (COPIES * H100.bandwidth))


def test_bytes_received() -> None:
    trace = traced(Begin(Send("all_gather", 800, "g"), 1), Begin(Send("all_reduce", 800, "g"), 2),
                   Graph("layer", (Send("all_to_all", 800, "g"),), 0))
    assert bytes_by_axis(trace) == Counter({"shard: all_gather": 700, "shard: all_reduce": 1400, "shard: all_to_all in layers": 700})


def test_how_many_ranks_a_token_meets() -> None:
    assert 8 * meeting(128, 6, 8) == pytest.approx(8 * (1 - math.comb(112, 6) / math.comb(128, 6)))
    assert meeting(8, 2, 1) == 1.0


def test_a_plan_from_the_command_line(tmp_path: Path) -> None:
    arguments = ["+experiment=nemotron_ep8", "model=nemotron3_tiny", "model.decoder.pattern=E", "model.encoder=null", "data.kind=text",
                 "row=256", "gpu=h100", "world=1024", f"picture={tmp_path}/plan.png"]
    done = subprocess.run([sys.executable, "plan.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"ranks", "fits", "peak_gib", "step_seconds", "tokens_per_second_per_gpu", "exposed_communication", "seconds",
                            "peak_rss_gib"}
    assert (figures["ranks"], figures["fits"]) == (1024, True)
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(("own", "sentence"), [
    ({"gpu": "h800"}, "gpu=h800 is unknown; choose one of h100"),
    ({"world": "12"}, "parallel.ep=8 needs a number of processes that is a multiple of 8"),
    ({"row": "long"}, "row=long is no number of tokens"),
])
def test_what_cannot_be_planned_is_one_sentence(own: dict[str, str], sentence: str) -> None:
    with pytest.raises(command.Refused) as refused:
        command.show_plan(own, ["+experiment=nemotron_ep8"], 0.0)
    assert len(refused.value.args) == 1
    assert refused.value.args[0].startswith(sentence)


def test_pipelines_are_not_planned() -> None:
    with pytest.raises(command.Refused, match="^parallel.pp=2 cuts the model into stages, which are not planned; choose parallel.pp=1"):
        command.show_plan({"world": "16"}, ["+experiment=nemotron_ep8", "parallel.pp=2"], 0.0)
    with pytest.raises(command.Refused, match="^parallel.offload=optimizer keeps state on the host, which is not planned; choose none"):
        command.show_plan({"world": "8"}, ["+experiment=nemotron_ep8", "parallel.offload=optimizer"], 0.0)


def test_layouts_keep_the_rules_and_rows_scale() -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    found = list(planner.layouts(planner.with_row(cfg, 4096), 16))
    assert {c.parallel.ep for c in found} == {1, 2, 4, 8, 16}
    assert all(validate(c, Environment(16, "")) == [] for c in found[::10])
    row = found[0].data.rows[0]
    assert (row.tokens, row.audio_frames, row.utterances) == (4096, 3584, 24)


def test_random_choices_spread_evenly() -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    # 49,152 choices a rank on average; the largest of eight binomial counts is within 4 of their standard deviations
    assert 1.0 < planner.random_imbalance(cfg) < 1 + 4 / math.sqrt(49152)
