"""The terminal of rank 0: what the run is, then a moving bar, or one line a logging interval where the output is no terminal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn


@dataclass(frozen=True)
class RunSummary:
    """What a run is, in numbers that are known before its first step."""

    run_dir: Path
    device: str  # cpu | cuda
    precision: str  # bf16 | fp32
    mesh: Mapping[str, int]  # mesh axis -> processes along it
    layout: Mapping[str, str]  # logical axis -> the mesh axis over which it is split
    parameters_total: int
    parameters_active: int  # that one token meets
    parameters_trainable: int
    adapters: str  # low-rank updates; empty: none
    tokens_per_step: int  # slots of all rows of a global batch
    audio_sec_per_step: float  # that the audio rows of a global batch hold at most
    memory_bytes: Mapping[str, int]  # expected on each rank, by use: weights, gradients, moments, ...
    tensorboard_dir: Path
    checkpoint_dir: Path


def banner(run: RunSummary) -> str:
    """The text with which a run starts."""
    gigabytes = {use: f"{size / 1e9:.2f}" for use, size in run.memory_bytes.items()}
    rows = {
        "run": str(run.run_dir),
        "processes": f"{math.prod(run.mesh.values())} on {run.device}, {run.precision}",
        "mesh": " × ".join(f"{axis} {size}" for axis, size in run.mesh.items()),
        "layout": ", ".join(f"{axis} over {where}" for axis, where in run.layout.items()) or "nothing is split",
        "parameters": f"{short(run.parameters_total)} total, {short(run.parameters_active)} active a token, "
                      f"{short(run.parameters_trainable)} trainable",
        **({"adapters": run.adapters} if run.adapters else {}),
        "a step": f"{run.tokens_per_step:,} tokens, up to {run.audio_sec_per_step:,.0f} s of audio",
        "memory": f"{sum(run.memory_bytes.values()) / 1e9:.2f} GB expected a rank: "
                  + ", ".join(f"{use} {size}" for use, size in gigabytes.items()),
        "logs": f"tensorboard --logdir {run.tensorboard_dir}",
        "checkpoints": str(run.checkpoint_dir),
    }
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())


def short(n: float) -> str:
    """1234567 -> 1.23 M."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def status(values: Mapping[str, float], steps_left: int) -> str:
    """The figures of one logging interval in one line; those that `values` lacks are left out."""
    formats = {
        "loss": "loss {:.4f}",
        "lr": "lr {:.2e}",
        "grad_norm": "grad {:.2f}",
        "tokens_per_sec": "{:,.0f} tokens/s",
        "audio_sec_per_sec": "{:,.0f} s audio/s",
        "data_wait_share": "wait {:.0%}",
    }
    parts = [text.format(values[name]) for name, text in formats.items() if name in values]
    if "step_sec" in values:
        parts.append(f"left {timedelta(seconds=round(values['step_sec'] * steps_left))}")
    return "  ".join(parts)


class Display:
    """The bar or the lines of one run; `console` is for tests."""

    def __init__(self, steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(24), TextColumn("{task.fields[status]}"))
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("train", total=steps, completed=first_step, status="compiling")
            self._bar.start()

    def tick(self, step: int) -> None:
        """Moves the bar; nothing elsewhere."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the figures of one logging interval."""
        text = status(values, self._steps - step)
        if self._bar:
            self._bar.update(self._task, completed=step, status=text)
        else:
            self.note(f"step {step}/{self._steps}  {text}")

    def note(self, text: str) -> None:
        """Prints `text` as it is, above the bar if there is one."""
        if self._bar:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._console.file, flush=True)  # rich would wrap at 80 columns

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
        if self._bar:
            self._bar.stop()
