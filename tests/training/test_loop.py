"""What a run does around its steps, with everything else replaced."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training import config, loop
from training.loop import Run, RunError
from training.state import State
from training.telemetry import Meter


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_state_that_went_wrong_is_not_saved(loss: float, norm: float) -> None:
    run = Run.__new__(Run)
    run.state = State(7, {}, {}, {}, {})
    run.metrics = {"loss": torch.tensor(loss), "grad_norm": torch.tensor(norm)}
    with pytest.raises(RunError, match=r"the loss is .* and the gradient norm .* at step 7; lower optimizer.lr"):
        run.save()


def test_the_position_is_that_of_the_last_micro_batch() -> None:
    run = Run.__new__(Run)
    run.cfg, _ = config.load(["+experiment=digits", "train.accumulate=2"])
    run.mesh = SimpleNamespace(device=torch.device("cpu"), sizes=SimpleNamespace(alike=4))  # type: ignore[assignment]
    run.meter, run.state = Meter(iter(range(100)).__next__), State(0, {}, {}, {}, {})
    run.telemetry = SimpleNamespace(tick=lambda step: None)  # type: ignore[assignment]
    run.loader = iter([{"state": {"batch": i}, "counters": {"bad_audio": i}, "tokens_T": torch.full((4,), i), "fill": 0.5, "audio_sec": 1.0}
                       for i in range(1, 5)])
    seen: list[list[int]] = []

    def step(state: State, batches: Any) -> tuple[State, dict[str, torch.Tensor]]:
        seen.append([int(batch["tokens_T"][0]) for batch in batches])
        return replace(state, step=state.step + 1), {}

    run.step = step
    for last in (2, 4):
        run.advance()
        assert run.position == {"batch": last}
        assert run.skipped == {"bad_audio": last}
    assert seen == [[1, 2], [3, 4]]
    figures = run.meter.flush(lambda sums: 4 * sums)  # of four ranks that share their rows
    assert figures["tokens_per_sec"] * figures["step_sec"] * 2 == 4 * 2
    assert figures["audio_sec_per_sec"] * figures["step_sec"] * 2 == 4 * 1.0


def test_the_best_checkpoint_has_the_lowest_validation_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.__new__(Run)
    run.cfg, _ = config.load(["+experiment=digits"])
    run.mesh, run.engine, run.run_dir, run.best = SimpleNamespace(rank=0, dp_rank=0, dp=1, row_group=None), None, tmp_path, None  # type: ignore[assignment]
    run.telemetry = SimpleNamespace(log_validation=lambda *args: None)  # type: ignore[assignment]
    marked: list[tuple[str, float]] = []
    monkeypatch.setattr(loop, "validation_names", lambda data: ["one", "two"])
    monkeypatch.setattr(loop, "validation_batches", lambda *args: [])
    monkeypatch.setattr(loop.checkpoint, "mark_best", lambda run_dir, path, value, mesh: marked.append((path.name, value)))
    monkeypatch.setattr(run, "save", lambda: tmp_path / f"step_{run.state.step:08d}", raising=False)
    for number, losses in enumerate([(3.0, 5.0), (2.0, 4.0), (1.0, 6.0), (2.5, 2.5)], 1):
        run.state, left = State(number, {}, {}, {}, {}), list(losses)
        monkeypatch.setattr(loop.evaluation, "validation_loss", lambda *args, left=left: {"loss": left.pop(0)})
        run.validate()
    assert marked == [("step_00000001", 4.0), ("step_00000002", 3.0), ("step_00000004", 2.5)]


@pytest.mark.parametrize(("every", "validated", "decoded", "saved"), [
    (0, [], [5], [5]), (2, [2, 4, 5], [2, 4, 5], [2, 4, 5]), (5, [5], [5], [5])])
def test_what_a_run_does_between_its_steps_and_at_the_end(every: int, validated: list[int], decoded: list[int], saved: list[int],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """At every so many steps and the last one; with 0 at the last one alone, but a validation never."""
    run = Run.__new__(Run)
    run.cfg, _ = config.load(["+experiment=digits", "train.steps=5", "train.log_every=0", "train.decode_at_start=false",
                              *(f"train.{key}={every}" for key in ("validate_every", "decode_every", "checkpoint_every"))])
    run.state, run.saved_step, run.outcome = State(0, {}, {}, {}, {}), 0, loop.Outcome()
    run.telemetry = SimpleNamespace(note=lambda text: None)  # type: ignore[assignment]
    run.interruption = SimpleNamespace(agreed=lambda: False)  # type: ignore[assignment]
    steps: dict[str, list[int]] = {"validate": [], "decode": [], "save": []}

    def advance() -> dict[str, torch.Tensor]:
        run.state = replace(run.state, step=run.state.step + 1)
        return {"loss_lm": torch.zeros(())}

    def decode() -> None:
        steps["decode"].append(run.state.step)
        run.outcome.wer[run.state.step] = {}

    def save() -> Path:
        steps["save"].append(run.state.step)
        run.saved_step = run.state.step
        return Path()

    others = {"warm_up": lambda: None, "advance": advance, "decode": decode, "save": save,
              "validate": lambda: steps["validate"].append(run.state.step)}
    for name, function in others.items():
        monkeypatch.setattr(run, name, function, raising=False)
    run.train()
    assert list(steps.values()) == [validated, decoded, saved]


def test_every_rank_resumes_from_its_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dp 2 x cp 2 ranks, of which pairs share their rows."""
    cfg, _ = config.load(["+experiment=digits", "train.resume=here", "train.steps=20"])
    states = [{"world": 2, "rank": rank // 2, "epoch": 0, "index": 5 + rank // 2} for rank in range(4)]
    meta = {"data": states, "data_before": None, "config": {"train": {"steps": 20}}}
    monkeypatch.setattr(loop.checkpoint, "load", lambda path, state, mesh, tables: (State(7, {}, {}, {}, {}), meta))
    for rank in range(4):
        mesh: Any = SimpleNamespace(rank=rank, pp_rank=0, dp=2, dp_rank=rank // 2)
        state, position, notes = loop.resume(cfg, State(0, {}, {}, {}, {}), mesh)
        assert (state.step, position) == (7, states[rank])
        assert notes == ["resuming from here at step 7"]
