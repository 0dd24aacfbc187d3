"""What a run reports: meters against hand-made clocks, files read back, and the lines on a terminal and elsewhere."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import figures
from training.progress import Display, RunSummary, banner, short, status
from training.telemetry import EVENTS_DIR, METRICS_FILE, Meter, Telemetry, compilations, expert_load, memory, to_floats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def plain_display(steps: int) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(steps, console=Console(file=out)), out


def test_to_floats_keeps_names_order_and_precision() -> None:
    values = {"loss": torch.tensor(0.25, requires_grad=True), "tokens": torch.tensor(2**24 + 1), "share": torch.tensor([0.5])}
    assert to_floats(values) == {"loss": 0.25, "tokens": 2**24 + 1, "share": 0.5}
    assert to_floats({}) == {}


def test_expert_load_is_most_over_mean() -> None:
    counts = {"layers.1": torch.tensor([3, 3, 3, 3]), "layers.4": torch.tensor([8, 0, 0, 0]), "layers.6": torch.tensor([1, 2, 3, 2])}
    assert to_floats(expert_load(counts)) == {"expert_load/layers.1": 1, "expert_load/layers.4": 4, "expert_load/layers.6": 1.5}


def test_meter_rates_leave_out_pauses_and_start_anew() -> None:
    clock = Clock()
    meter = Meter(clock)
    for wait_sec in (1.0, 2.0):
        with meter.waiting():
            clock.now += wait_sec
        clock.now += 3.5  # the step
        meter.add(tokens=600, slots=800, audio_sec=40.0)
    with meter.paused():
        clock.now += 1000.0
    expected = {"tokens_per_sec": 120, "audio_sec_per_sec": 8, "step_sec": 5, "padding_share": 0.25, "data_wait_share": 0.3}
    assert meter.flush() == pytest.approx(expected)

    clock.now += 4.0
    meter.add(tokens=100, slots=100, audio_sec=2.0)
    expected = {"tokens_per_sec": 25, "audio_sec_per_sec": 0.5, "step_sec": 4, "padding_share": 0, "data_wait_share": 0}
    assert meter.flush() == pytest.approx(expected)


def test_meter_adds_ranks_up() -> None:
    clock = Clock()
    meter = Meter(clock)
    with meter.waiting():
        clock.now += 1.0
    clock.now += 3.0
    meter.add(tokens=100, slots=200, audio_sec=8.0)
    meter.add(tokens=100, slots=200, audio_sec=8.0)
    other = torch.tensor([400.0, 400.0, 24.0, 2.0, 4.0, 2.0, 1.0], dtype=torch.float64)  # another rank: full rows, waits twice as long
    expected = {"tokens_per_sec": 150, "audio_sec_per_sec": 10, "step_sec": 2, "padding_share": 0.25, "data_wait_share": 0.375}
    assert meter.flush(lambda sums: sums + other) == pytest.approx(expected)


def test_compilations_counts_every_graph() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    before = compilations()
    for length in (2, 3, 3, 2, 4):
        compiled(torch.ones(length))
    assert compilations() - before == 3


def test_memory_is_in_bytes() -> None:
    assert 100e6 < memory()["host_peak_bytes"] < 50e9  # torch alone takes more than 100 MB


def test_files_hold_what_was_logged(tmp_path: Path) -> None:
    display, out = plain_display(20)
    telemetry = Telemetry(tmp_path, rank=0, steps=20, display=display)
    telemetry.log_step(10, {"loss": 2.5, "expert_load/layers.1": 1.5, "grad_norm": float("nan")})
    examples = [("one | two", "one\ntoo"), ("six", "six"), ("ten", "den")]
    telemetry.log_validation(10, "digits", {"loss": 2.0, "wer": 0.5, "words": 1234}, examples, mel_MA=torch.arange(6.0).reshape(2, 3))
    telemetry.close()

    step, validation = metrics(tmp_path)
    assert step["step"] == validation["step"] == 10
    assert (step["train/loss"], step["train/expert_load/layers.1"], step["train/grad_norm"]) == (2.5, 1.5, None)
    assert step["train/host_peak_bytes"] > 0
    assert step["train/compilations"] >= 0
    assert (validation["validation/digits/loss"], validation["validation/digits/wer"]) == (2.0, 0.5)

    events = EventAccumulator(str(tmp_path / EVENTS_DIR)).Reload()
    assert set(events.Tags()["scalars"]) == {key for key in {**step, **validation} if "/" in key}
    assert [(e.step, e.value) for e in events.Scalars("validation/digits/wer")] == [(10, 0.5)]
    (text,) = events.Tensors("validation/digits/transcripts/text_summary")
    assert text.tensor_proto.string_val[0].decode().splitlines()[2:] == ["| one \\| two | one too |", "| six | six |", "| ten | den |"]
    (image,) = events.Images("validation/digits/mel")
    assert (image.height, image.width) == (2, 3)

    lines = out.getvalue().splitlines()
    assert lines[1] == "validation digits at step 10: loss 2  wer 0.5000  words 1,234"
    assert sum(line.startswith("  said") for line in lines) == 2


def test_spectrogram_has_low_frequencies_at_the_bottom(tmp_path: Path) -> None:
    from PIL import Image

    telemetry = Telemetry(tmp_path, rank=0, steps=1, display=plain_display(1)[0])
    telemetry.log_validation(1, "digits", {}, mel_MA=torch.tensor([[1.0, 2.0], [-3.0, 7.0]]))
    telemetry.close()
    events = EventAccumulator(str(tmp_path / EVENTS_DIR)).Reload()
    picture = Image.open(io.BytesIO(events.Images("validation/digits/mel")[0].encoded_image_string)).convert("L")
    assert [picture.getpixel(at) for at in ((0, 0), (1, 0), (0, 1), (1, 1))] == pytest.approx([0, 255, 0.4 * 255, 0.5 * 255], abs=1)


def test_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    def run(first_step: int, last_step: int, offset: float) -> None:
        telemetry = Telemetry(tmp_path, rank=0, steps=50, first_step=first_step, display=plain_display(50)[0])
        for step in range(first_step + 10, last_step + 1, 10):
            telemetry.log_step(step, {"loss": step + offset})
        telemetry.close()

    run(0, 40, 0.0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4')  # killed while writing
    run(20, 50, 0.5)
    expected = [(10, 10), (20, 20), (30, 30.5), (40, 40.5), (50, 50.5)]
    assert [(line["step"], line["train/loss"]) for line in metrics(tmp_path)] == expected
    curve = figures.read(tmp_path)["train/loss"]
    assert list(zip(curve.steps, curve.values, strict=True)) == expected


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(tmp_path / "run", rank=1, steps=5)
    telemetry.tick(1)
    telemetry.log_step(1, {"loss": 1.0})
    telemetry.log_validation(1, "digits", {"loss": 1.0}, [("a", "b")])
    telemetry.note("hello")
    telemetry.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_exactly_one_line_an_interval_where_there_is_no_terminal() -> None:
    display, out = plain_display(300)
    values = {"loss": 2.34567, "lr": 1e-3, "grad_norm": 1.239, "tokens_per_sec": 5432.1, "audio_sec_per_sec": 98.4,
              "data_wait_share": 0.012, "step_sec": 0.75, "padding_share": 0.2}
    for step in range(1, 101):
        display.tick(step)
        if step % 50 == 0:
            display.log(step, values)
    display.close()
    assert out.getvalue().splitlines() == [
        "step 50/300  loss 2.3457  lr 1.00e-03  grad 1.24  5,432 tokens/s  98 s audio/s  wait 1%  left 0:03:08",
        "step 100/300  loss 2.3457  lr 1.00e-03  grad 1.24  5,432 tokens/s  98 s audio/s  wait 1%  left 0:02:30",
    ]


def test_bar_on_a_terminal_shows_step_and_figures() -> None:
    out = io.StringIO()
    display = Display(300, first_step=20, console=Console(file=out, force_terminal=True, width=160, _environ={}))
    display.log(40, {"loss": 1.5, "step_sec": 1.0})
    display.tick(41)
    display.note("validation [digits]")
    display.close()
    text = out.getvalue()
    assert " 20/300" in text
    assert " 41/300" in text
    assert "loss 1.5000  left 0:04:20" in text
    assert "validation [digits]" in text


def test_status_leaves_out_what_is_missing() -> None:
    assert status({"loss": 1.0}, 10) == "loss 1.0000"


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1234, "1.23 k"), (1_234_567, "1.23 M"), (31_600_000_000, "31.6 B")])
def test_short(number: float, text: str) -> None:
    assert short(number) == text


def test_banner_says_what_the_run_is(tmp_path: Path) -> None:
    run = RunSummary(
        run_dir=tmp_path, device="cuda", precision="bf16", mesh={"dp_replicate": 2, "dp_shard": 4},
        layout={"experts": "ep", "embed": "dp_shard"}, parameters_total=31_600_000_000, parameters_active=3_600_000_000,
        parameters_trainable=1_200_000, adapters="3 of rank 8", tokens_per_step=65536, audio_sec_per_step=3276.8,
        memory_bytes={"weights": 4_000_000_000, "moments": 8_250_000_000},
        tensorboard_dir=tmp_path / "tensorboard", checkpoint_dir=tmp_path / "checkpoints",
    )
    lines = dict(line.split(maxsplit=1) for line in banner(run).replace("a step", "a_step").splitlines())
    assert lines == {
        "run": str(tmp_path),
        "processes": "8 on cuda, bf16",
        "mesh": "dp_replicate 2 × dp_shard 4",
        "layout": "experts over ep, embed over dp_shard",
        "parameters": "31.6 B total, 3.6 B active a token, 1.2 M trainable",
        "adapters": "3 of rank 8",
        "a_step": "65,536 tokens, up to 3,277 s of audio",
        "memory": "12.25 GB expected a rank: weights 4.00, moments 8.25",
        "logs": f"tensorboard --logdir {tmp_path}/tensorboard",
        "checkpoints": f"{tmp_path}/checkpoints",
    }


def test_figures_are_drawn_from_event_files(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, rank=0, steps=20, display=plain_display(20)[0])
    for step in (10, 20):
        telemetry.log_step(step, {"loss": 1.0 / step})
        telemetry.log_validation(step, "digits", {"loss": 2.0 / step, "wer": 4.0 / step})
        telemetry.log_validation(step, "letters", {"wer": 0.125})
    telemetry.close()
    curves = figures.read(tmp_path)
    assert figures.by_set(curves, "wer") == {"digits": ([10, 20], pytest.approx([0.4, 0.2])), "letters": ([10, 20], [0.125, 0.125])}
    assert set(figures.by_set(curves, "loss")) == {"digits"}
    figures.main([str(tmp_path), str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_figures_refuse_a_folder_without_events(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no tensorboard folder"):
        figures.main([str(tmp_path), "out.png"])
