"""What plan.py predicts: closed forms of small graphs, timelines and layouts; the whole is compared with runs by perf plan_check."""

import dataclasses
import json
import math
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from parallel.validate import Environment, validate
from perf.cases import Work
from perf.planning import command, planner
from perf.planning.costs import Load
from perf.planning.graphs import Begin, Graph, Send, Wait, analyse, outcome
from perf.planning.machines import COPIES, LATENCY_SEC, LINKS, MACHINES, PRODUCTS, RESERVED_BYTES
from perf.planning.meter import FROM_HOST, TO_HOST, Copied, HostWork, Meter, Sent, Taken, TooMuch, Trace
from perf.planning.repeats import record, repeat
from perf.planning.timeline import Times, bytes_by_axis, step_times
from perf.planning.trace import Layers, exchange, meeting
from training import config, optimizer

H100 = MACHINES["h100"]
LOAD = Load(expert_rows=10, document_tokens=8, utterance_frames=8)
ROOT = Path(__file__).parents[2]
TEXT = ["+experiment=nemotron_ep8", "model=nemotron3_tiny", "model.encoder=null", "data.kind=text", "data.manifest=x", "data.tokenizer=x",
        "data.rows=[{tokens: 256, audio_frames: 0, utterances: 4, utterance_frames: 0, label_tokens: 0}]"]

pytestmark = pytest.mark.usefixtures("no_processes")


def test_a_graph_counts_products_and_one_pass_over_what_is_fused() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * 2 + 1  # one pass: reads x, writes h
        return (h @ w).relu().sum(1)  # one pass: reads the product, writes the sum

    graph = make_fx(layer, tracing_mode="fake")(torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16))
    found = analyse("layer", graph, LOAD)
    assert sorted((s.flops, s.bytes) for s in found.steps if isinstance(s, Work)) == [
        (0, 2 * (30 + 6)), (0, 2 * (24 + 24)), (2 * 6 * 4 * 5, 2 * (24 + 20 + 30))]
    assert found.transient_bytes == 2 * (24 + 30)  # h and the product at once


def test_parts_of_a_split_are_no_memory_of_their_own() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        a, b = x.split([1, 3], 1)
        return a.t() @ b.mul(2)  # reads 3 of 4 columns

    graph = make_fx(layer, tracing_mode="fake")(torch.ones(3, 4, dtype=torch.bfloat16))
    found = analyse("layer", graph, LOAD)
    assert sorted((s.flops, s.bytes) for s in found.steps if isinstance(s, Work)) == [(0, 2 * (9 + 9)), (2 * 3 * 3, 2 * (3 + 9 + 3))]
    assert found.transient_bytes == 2 * (9 + 3)


def test_what_a_graph_returns_lies_where_it_would() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x @ w
        return h, h[1:].t(), x, x[:, 2:].t(), h + 1

    made = outcome(make_fx(layer, tracing_mode="fake")(torch.ones(6, 4), torch.ones(4, 5)))
    x, w = torch.arange(40.0)[8:32].view(6, 4), torch.ones(4, 5)
    h, part, same, cut, more = made([x, w])
    assert same is x
    assert torch.equal(cut, x[:, 2:].t())
    assert (part.shape, part.stride(), part.data_ptr()) == ((5, 5), (1, 5), h[1:].data_ptr())
    assert more.shape == h.shape
    assert more.data_ptr() != h.data_ptr()


@dataclasses.dataclass(frozen=True)
class Nothing:
    """A context without boundaries."""


def product(x: torch.Tensor, w: torch.Tensor, context: Nothing) -> torch.Tensor:
    return (x @ w).relu()


def test_a_layer_keeps_its_result_and_what_backward_needs_alone() -> None:
    with FakeTensorMode(), Meter(Trace(), LOAD, 1) as meter:
        call = Layers(meter, LOAD, halved=False).function(product)
        for _ in range(2):
            x, w = (torch.empty(4, 8, requires_grad=True), torch.empty(8, 2, requires_grad=True))
            out = call(x, w, Nothing())
            assert meter.live.total() == 4 * (32 + 16 + 8 + 2)  # and for relu a byte an element
            del x, w
            assert meter.live.total() == 4 * (32 + 16 + 8 + 2)
            del out
            assert meter.live.total() == 0


def test_a_recording_repeats_results_and_events() -> None:
    events: list[Any] = []

    def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor | None]:
        out, inner = torch.ones(4), torch.ones(2)
        for begun in (out, inner):
            events.append(Begin(Send("all_gather", 8, "g"), begun.untyped_storage()._cdata))
        events.extend(Wait(t.untyped_storage()._cdata) for t in (inner, x))
        return [out, None, out[1:], y[2:]]

    inputs = [torch.ones(3), torch.ones(3)]
    first, recording = record(lambda: run(*inputs), inputs, events, lambda: 7)
    assert recording is not None
    assert recording.transient_bytes == 7
    x, y = torch.ones(4)[1:], torch.arange(5.0)[2:]
    (out, none, part, rest), again = repeat(recording, [x, y])
    assert none is None
    assert (out.shape, part.shape, part.data_ptr()) == ((4,), (3,), out[1:].data_ptr())
    assert torch.equal(rest, torch.tensor([4.0]))
    assert out.data_ptr() != first[0].data_ptr()
    begun, inner, waited, given = (e.storage for e in again)
    assert (begun, given) == (out.untyped_storage()._cdata, x.untyped_storage()._cdata)
    assert inner == waited
    assert inner not in {e.storage for e in events}


def traced(*events: object, ranks: int = 8, node: str = "shard") -> Trace:
    return Trace(events=list(events), groups={"g": (node, list(range(ranks)))})  # type: ignore[arg-type]


def of_one(trace: Trace) -> Times:
    return step_times([trace], H100)[0]


def test_a_collective_hides_behind_the_work_until_its_wait() -> None:
    size = 1 << 30
    sending = size * 7 / 8 / (LINKS * H100.link) + LATENCY_SEC
    work = Work(0.5 * sending * PRODUCTS * H100.flops, 0)
    times = of_one(traced(Begin(Send("all_gather", size, "g"), 1), work, Wait(1), work))
    assert times.compute == pytest.approx(sending)
    assert times.exposed == pytest.approx(0.5 * sending)
    assert times.hidden == pytest.approx(0.5 * sending)
    inside = of_one(traced(Graph("layer", (work, Begin(Send("reduce_scatter", size, "g"), 1), work, Wait(1), work), 0)))
    assert (inside.exposed, inside.total) == (pytest.approx(0.5 * sending), pytest.approx(2 * sending))


def test_a_group_sends_one_thing_after_the_other() -> None:
    size = 1 << 30
    one = size * 7 / 8 / (LINKS * H100.link) + LATENCY_SEC
    times = of_one(traced(Begin(Send("all_gather", size, "g"), 1), Begin(Send("all_gather", size, "g"), 2), Wait(1), Wait(2)))
    assert times.total == pytest.approx(2 * one)


@pytest.mark.parametrize(("ranks", "seconds"), [
    ([0, 8], (1 << 29) / (LINKS * H100.network)),  # one a node: half of it comes through one network
    (list(range(16)), (1 << 30) * 15 / 16 / (LINKS * H100.link)),  # eight networks share what the other node has, and links are slower
    (list(range(0, 64, 4)), (1 << 30) * 7 / 8 / 2 / (LINKS * H100.network)),  # two a node
])
def test_links_or_the_network_decide(ranks: list[int], seconds: float) -> None:
    trace = Trace(events=[Begin(Send("all_gather", 1 << 30, "g"), 1), Wait(1)], groups={"g": ("shard", ranks)})
    assert of_one(trace).total == pytest.approx(seconds + LATENCY_SEC)


@pytest.mark.parametrize(("ranks", "rate"), [([0, 1, 2], H100.link), ([6, 7, 8], H100.network)])
def test_a_ring_is_as_fast_as_its_slowest_pair(ranks: list[int], rate: float) -> None:
    trace = Trace(events=[Begin(Send("hand_on", 1 << 20, "g"), 1), Wait(1)], groups={"g": ("cp", ranks)})
    assert of_one(trace).total == pytest.approx((1 << 20) / (LINKS * rate) + LATENCY_SEC)
    assert bytes_by_axis(trace) == Counter({"cp: hand_on": 1 << 20})


def test_products_wait_for_copies_to_the_host_and_for_what_it_computes() -> None:
    work = Work(1e-3 * PRODUCTS * H100.flops, 0)
    trace = traced(work, Copied(TO_HOST, 1 << 30), HostWork(1 << 20), Copied(FROM_HOST, 1 << 29), work)
    times = of_one(trace)
    assert times.exposed == pytest.approx(3 * (1 << 29) / (LINKS * 64e9))  # PCIe 5.0 x16
    assert times.compute == pytest.approx(2e-3 + (1 << 20) / (COPIES * 614e9 / 8))  # a GPU's share of 16 channels of DDR5-4800
    assert times.total == pytest.approx(times.exposed + times.compute)
    assert bytes_by_axis(trace) == Counter({TO_HOST: 1 << 30, FROM_HOST: 1 << 29})


def test_a_collective_that_nobody_waits_for_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="1 collectives that nobody waits for"):
        of_one(traced(Begin(Send("all_gather", 800, "g"), 1), Wait(2)))


def test_memory_bounds_a_pass() -> None:
    assert of_one(traced(Work(1.0, 1e9))).compute == pytest.approx(1e9 / (COPIES * H100.bandwidth))


def test_bytes_received() -> None:
    trace = traced(Begin(Send("all_gather", 800, "g"), 1), Begin(Send("all_reduce", 800, "g"), 2),
                   Graph("layer", (Begin(Send("all_to_all", 800, "g"), 3), Wait(3)), 0))
    assert bytes_by_axis(trace) == Counter({"shard: all_gather": 700, "shard: all_reduce": 1400, "shard: all_to_all in layers": 700})


def test_how_many_ranks_a_token_meets() -> None:
    assert 8 * meeting(128, 6, 8) == pytest.approx(8 * (1 - math.comb(112, 6) / math.comb(128, 6)))
    assert meeting(8, 2, 1) == 1.0


@pytest.mark.parametrize(("fill", "imbalance", "received"), [(1.0, 1.0, 559), (0.5, 1.0, 279), (0.5, 1.5, 419), (0.5, 8.0, 500)])
def test_padding_does_not_travel_and_the_fullest_rank_receives_at_most_all(fill: float, imbalance: float, received: int) -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    group = SimpleNamespace(size=lambda: 8)
    plan = exchange(cfg, Load(0, 0, 0, fill, imbalance))(torch.empty(1000, 6, dtype=torch.int64), 16, group)
    assert 1000 * meeting(128, 6, 8) == pytest.approx(558.89, abs=0.01)
    assert plan.received == [received] * 8
    assert plan.sent == [round(558.89 * fill)] * 8
    assert plan.token_R.shape == (8 * round(558.89 * fill),)


def test_a_plan_from_the_command_line(tmp_path: Path) -> None:
    arguments = ["+experiment=nemotron_ep8", "model=nemotron3_tiny", "model.decoder.pattern=E", "model.encoder=null", "data.kind=text",
                 "row=256", "gpu=h100", "world=1024", "imbalance=1.5", "fill=0.9", f"picture={tmp_path}/plan.png"]
    done = subprocess.run([sys.executable, "plan.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"ranks", "fits", "peak_gib", "step_seconds", "tokens_per_second_per_gpu", "exposed_communication",
                            "host_gib", "seconds", "peak_rss_gib"}
    assert (figures["ranks"], figures["fits"], figures["host_gib"]) == (1024, True, 0.0)
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_search_lists_what_fits_and_is_fastest_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path) -> None:
    monkeypatch.setattr(command, "TRIED", 3)
    monkeypatch.setattr(command, "PROCESSES", 1)
    own, text = {"gpu": "rtx4090", "world": "2"}, [*TEXT, "model.decoder.pattern=E"]
    best = command.search(own | {"picture": f"{tmp_path}/layouts.png"}, text, 0.0)
    assert (best["tried"], best["fits"], best["recomputed"]) == (3, True, "none")
    assert (tmp_path / "layouts.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    rates = [int(line.split("│")[6]) for line in printed.splitlines() if line.startswith("│")]
    assert len(rates) == 3
    assert rates == sorted(rates, reverse=True)
    assert best["tokens_per_second_per_gpu"] == rates[0]
    pasted = shlex.split(next(line for line in printed.splitlines() if "alone: " in line).split("alone: ")[1])
    assert pasted[:2] == ["python", "plan.py"]
    cfg, world, machine = command.read(own, [argument for argument in pasted[2:] if argument.split("=")[0] not in own])
    again = planner.figures(planner.plan(cfg, world, machine))
    assert again == {key: best[key] for key in again}


@pytest.mark.parametrize(("own", "sentence"), [
    ({"gpu": "h800"}, "gpu=h800 is unknown; choose one of h100"),
    ({"world": "12"}, "parallel.ep=8 needs a number of processes that is a multiple of 8, and there are 12; give world=16"),
    ({"row": "long"}, "row=long is no number of tokens"),
    ({"imbalance": "much"}, "imbalance=much is no number from 1.0 to 8.0"),
    ({"imbalance": "9"}, "imbalance=9 is no number from 1.0 to 8.0"),
    ({"fill": "0"}, "fill=0 is no number from 0.01 to 1.0"),
    ({"picture": "plan.txt"}, "picture=plan.txt is no kind of picture; let its name end in one of .png, .pdf, .svg"),
    ({"picture": "/proc/nowhere/plan.png"}, "picture=/proc/nowhere/plan.png cannot be written (No such file or directory)"),
])
def test_what_cannot_be_planned_is_one_sentence(own: dict[str, str], sentence: str) -> None:
    with pytest.raises(command.Refused) as refused:
        command.show_plan(own, ["+experiment=nemotron_ep8"], 0.0)
    assert len(refused.value.args) == 1
    assert refused.value.args[0].startswith(sentence)


def test_a_plan_that_need_not_go_to_the_end_stops_where_memory_does() -> None:
    cfg, _ = config.load([*TEXT, "model.decoder.pattern=E"])
    small = dataclasses.replace(H100, memory_bytes=RESERVED_BYTES + 1024)
    with pytest.raises(TooMuch):
        planner.plan(cfg, 8, small, to_the_end=False)
    assert not torch.distributed.is_initialized()


def test_an_update_reads_and_writes_what_it_changes() -> None:
    with FakeTensorMode(), Meter(Trace(), LOAD, 1) as meter:
        weights, grads, first, second = ({"a": torch.empty(1000), "b": torch.empty(200)} for _ in range(4))
        meter.trace.events.clear()
        moved: list[float] = []
        for divisor in (None, torch.ones(())):
            optimizer.update(weights, grads, first, second, 0, 1e-3, config.load(TEXT)[0].optimizer, {"a", "b"}, divisor)
            moved.append(sum(e.bytes for e in meter.trace.events if isinstance(e, Work)) - sum(moved))
    assert moved == [pytest.approx(1200 * (16 + 12), abs=64), pytest.approx(1200 * (16 + 16), abs=64)]  # and a few numbers


def test_state_on_the_host_takes_its_memory_and_the_link_to_it() -> None:
    text = [*TEXT, "model.decoder.pattern=*", "parallel.ep=1"]
    none, first, all_of_it = (planner.plan(config.load([*text, f"parallel.offload={offload}"])[0], 2, H100)
                              for offload in ("none", "optimizer", "parameters"))
    held = none.trace.state["parameters"] / 4
    assert (none.trace.host_peak_bytes, first.trace.state["moments"], all_of_it.trace.state["parameters"]) == (0, 0, 0)
    blocks = 512 * 100  # a tensor takes whole ones
    assert first.trace.state["parameters"] == pytest.approx(2 * held, abs=blocks)
    assert first.trace.host_state_bytes == pytest.approx(12 * held, abs=blocks)
    assert all_of_it.trace.host_state_bytes == pytest.approx(14 * held, abs=blocks)
    gathered = sum(size for name, size in bytes_by_axis(none.trace).items() if name.endswith("all_gather"))
    moved = [bytes_by_axis(p.trace) for p in (first, all_of_it)]
    for by_axis, fetched in zip(moved, (2 * held, gathered), strict=True):  # of two ranks each gets from the other as much as it has
        assert by_axis[TO_HOST] == pytest.approx(4 * held, abs=blocks)
        assert by_axis[FROM_HOST] == pytest.approx(fetched, abs=blocks)
    numbers = moved[0][TO_HOST] / 4
    assert first.times.by_graph["the host"] == pytest.approx(28 * numbers / (COPIES * H100.host_bandwidth), rel=0.01)
    copying = sum(first.times.by_axis[way] for way in (TO_HOST, FROM_HOST))
    assert copying == pytest.approx(6 * numbers / (LINKS * H100.host_link))


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_of_a_second_row_are_there_a_layer_at_a_time(compiled: bool) -> None:
    """Beside the sum of the rows before, at most those that are computed and those that travel."""
    text = [*TEXT, "model.decoder.pattern=--------", "model.decoder.mlp_ffn=4096", "parallel.ep=1", "parallel.defer_grad_sync=false",
            "data.rows=[{tokens: 16, audio_frames: 0, utterances: 1, utterance_frames: 0, label_tokens: 0}]", f"compile.enabled={compiled}"]
    one, two, four = (planner.plan(config.load([*text, f"train.accumulate={rows}"])[0], 2, H100).trace for rows in (1, 2, 4))
    layer = one.state["parameters"] / 8
    assert two.peak_bytes - one.peak_bytes == pytest.approx(2 * layer, rel=0.05)
    assert four.peak_bytes == two.peak_bytes


def test_a_ring_hands_keys_on_and_their_gradients_back() -> None:
    text = [*TEXT, "model.decoder.pattern=**", "parallel.ep=1", "parallel.cp=4", "train.activation_checkpointing=none"]
    found, eager = (planner.plan(config.load([*text, "parallel.cp_attention=ring", f"compile.enabled={enabled}"])[0], 4, H100)
                    for enabled in (True, False))
    d = found.cfg.model.decoder
    own = 256 // 4 * 2 * d.n_kv_heads * d.head_dim * 2
    received, received_eagerly = (sum(size for name, size in bytes_by_axis(p.trace).items() if "hand_on" in name) for p in (found, eager))
    assert received_eagerly == 2 * (3 + 3 + 2 * 4) * own  # of two layers; gradients are twice as wide and go all round
    assert received == received_eagerly - 2 * own  # what arrives first is the same in both passes, and kept
    gathered = planner.plan(config.load([*text, "parallel.cp_attention=gather"])[0], 4, H100)
    work = [sum(step.flops for graph in plan.trace.events if isinstance(graph, Graph) for step in graph.steps if isinstance(step, Work))
            for plan in (found, gathered)]
    assert work[0] == pytest.approx(work[1])


@pytest.mark.parametrize(("parallel", "ranks"), [("dp_replicate", 4), ("pp", 2)])
def test_a_loss_that_balances_experts_adds_their_counts_up_over_the_stage_once_a_layer(parallel: str, ranks: int) -> None:
    text = [*TEXT, "model.decoder.pattern=EE", "parallel.ep=1", f"parallel.{parallel}=2", "train.activation_checkpointing=selective"]
    without, found = (planner.plan(config.load([*text, f"model.decoder.aux_loss_coeff={weight}"])[0], 4, H100) for weight in (0, 0.1))
    counts = 2 * (ranks - 1) / ranks * 8 * found.cfg.model.decoder.n_experts  # received of an all-reduce of 64-bit numbers
    for trace in found.traces:
        sent = [size for name, size in bytes_by_axis(trace).items() if name.endswith("all_reduce in layers")]
        assert sent == [2 * counts / len(found.traces)]
    assert not any("all_reduce in layers" in name for trace in without.traces for name in bytes_by_axis(trace))


@pytest.mark.parametrize(("utterances", "own"), [
    (1, 4 * (2 * 32 ** 2 + 32) / (256 * 257 / 2)),  # a rank's two chunks of 32 see themselves, and the later one all of the earlier
    (8, 1.0),  # documents of a chunk
])
def test_how_much_of_a_document_a_rank_of_a_ring_has(utterances: int, own: float) -> None:
    cfg, _ = config.load([*TEXT, "parallel.ep=1", "parallel.cp=4"])
    cfg.data.rows[0].utterances = utterances
    found, seen = planner.load(cfg).ring, 256 / utterances / 2
    assert found is not None
    assert (found.tokens, found.own) == (64, pytest.approx(own * seen))
    assert found.own + 3 * found.other == pytest.approx(seen)


def pipeline(rows: int, work: Work, size: int) -> list[Trace]:
    """Two ranks, equal stages, backward as long as forward."""
    groups = {"g": ("pp, ends of pp", [0, 1])}
    first: list[Any] = [event for _ in range(rows) for event in (work, Sent(1, size))]
    first += [event for row in range(rows) for event in (Taken(1, row, size), work)]
    last: list[Any] = [event for row in range(rows) for event in (Taken(0, row, size), work)]
    last += [event for _ in range(rows) for event in (work, Sent(0, size))]
    return [Trace(events=first, groups=groups), Trace(events=last, groups=groups)]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_pipeline_waits_for_its_first_and_last_row(rows: int) -> None:
    size = 1 << 20
    travel, one = size / (LINKS * H100.link) + LATENCY_SEC, 1e-3
    first, last = step_times(pipeline(rows, Work(one * PRODUCTS * H100.flops, 0), size), H100)
    for times in (first, last):
        assert times.compute == pytest.approx(2 * rows * one)
        assert times.total == pytest.approx((2 * rows + 2) * one + 2 * travel)
    assert last.exposed == pytest.approx(travel)  # of its first row; the others arrive while it computes
    assert last.bubble == pytest.approx(2 * one + travel)
    assert first.by_axis["pp: receive"] == pytest.approx(rows * travel)
    assert bytes_by_axis(pipeline(rows, Work(0.0, 0.0), size)[1]) == Counter({"pp: receive": rows * size})


def test_a_message_that_nobody_sends_is_a_fault() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] of the pipeline wait for ever"):
        step_times(pipeline(1, Work(1.0, 0.0), 8)[:1], H100)


def test_stages_of_a_pipeline_have_their_own_parts_and_rows_under_way() -> None:
    cfg, _ = config.load([*TEXT, "model.decoder.pattern=****", "parallel.ep=1", "parallel.pp=2", "train.accumulate=2"])
    found = planner.plan(cfg, 4, H100)
    assert [[e.to for e in trace.events if isinstance(e, Sent)] for trace in found.traces] == [[1, 1], [0, 0]]
    kept = [trace.forward_bytes for trace in found.traces]
    one = planner.plan(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=1)), 4, H100)
    hidden = 256 * cfg.model.decoder.d_model * 2
    assert kept[0] == pytest.approx(2 * one.traces[0].forward_bytes, abs=hidden)  # 1f1b: two rows under way on the first rank
    assert found.times.bubble > 0
    assert max(t.total for t in found.all_times) == pytest.approx(min(t.total for t in found.all_times))


def test_layouts_keep_the_rules_and_rows_scale() -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    found = list(planner.layouts(planner.with_row(cfg, 4096), 16))
    assert {c.parallel.ep for c in found} == {1, 2, 4, 8, 16}
    assert all(validate(c, Environment(16, "")) == [] for c in found[::10])
    row = found[0].data.rows[0]
    assert (row.tokens, row.audio_frames, row.utterances) == (4096, 3584, 24)


def test_a_search_begins_with_experts_of_a_node_and_nothing_else_split() -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    first = [(c.parallel.zero_stage, c.parallel.pp, c.parallel.cp, c.parallel.tp, c.parallel.ep, c.parallel.ep_dispatch)
             for c in command.most_promising(cfg, 8, H100)[:4]]
    assert first[0] == (3, 1, 1, 1, 8, "alltoall")
    assert (3, 1, 1, 1, 8, "allgather") in first


def test_random_choices_spread_evenly() -> None:
    cfg, _ = config.load(["+experiment=nemotron_ep8", "data.manifest=x", "data.tokenizer=x"])
    # 49,152 choices a rank on average; the largest of eight binomial counts is within 4 of their standard deviations
    assert 1.0 < planner.random_imbalance(cfg) < 1 + 4 / math.sqrt(49152)
    cfg.model.decoder.force_balance = True
    assert planner.random_imbalance(cfg) == 1.0
