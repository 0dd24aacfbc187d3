"""What a run reports, and the meters behind it: TensorBoard, metrics.jsonl and the terminal, all written by rank 0.

Scalars are named train/<figure> and validation/<set>/<figure>, the same in the event files and in metrics.jsonl. Figures that live
on the device come to the host together, with `to_floats`, and only at logging intervals.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from training.progress import Display

EVENTS_DIR = "tensorboard"  # below the run's folder
METRICS_FILE = "metrics.jsonl"
EXAMPLES_ON_SCREEN = 2


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as Python numbers, with one copy from the device for all of them."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().reshape(()).double() for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))


def expert_load(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer -> routed tokens an expert [E] as expert_load/<layer> -> most / mean: 1 is balanced, E is all on one expert."""
    return {f"expert_load/{layer}": count_E.max() / count_E.double().mean() for layer, count_E in counts.items()}


def compilations() -> int:
    """Graphs that torch.compile has made in this process, recompilations included."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it costs seconds, and before that nothing was compiled
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def memory() -> dict[str, float]:
    """Most memory that this process has held so far, on the host and, where there is one, on its GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    sizes = {"host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if torch.cuda.is_initialized():
        sizes["device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return sizes


class Meter:
    """Sums of host-side numbers over the steps since the last flush; every rank keeps one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._started = self._clock()
        self._wait_sec = self._audio_sec = self._tokens = self._slots = 0.0
        self._steps = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what happens inside as waiting for data."""
        started = self._clock()
        yield
        self._wait_sec += self._clock() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside: validation, a checkpoint."""
        started = self._clock()
        yield
        self._started += self._clock() - started

    def add(self, tokens: float, slots: float, audio_sec: float) -> None:
        """Counts one step of this rank, its share of rows that several ranks have: `tokens` of the `slots` are used."""
        self._tokens += tokens
        self._slots += slots
        self._audio_sec += audio_sec
        self._steps += 1

    def flush(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """The rates of all ranks together, and a new start; needs at least one step.

        `reduce` adds a host tensor up over the ranks that see different batches; all of them must call this together.
        """
        local = [self._tokens, self._slots, self._audio_sec, self._wait_sec, self._clock() - self._started, self._steps, 1]
        tokens, slots, audio_sec, wait_sec, elapsed_sec, steps, ranks = reduce(torch.tensor(local, dtype=torch.float64)).tolist()
        self._restart()
        return {
            "tokens_per_sec": tokens * ranks / elapsed_sec,
            "audio_sec_per_sec": audio_sec * ranks / elapsed_sec,
            "step_sec": elapsed_sec / steps,
            "padding_share": 1 - tokens / slots,
            "data_wait_share": wait_sec / elapsed_sec,
        }


class Telemetry:
    """Writes one run's figures below `run_dir` and shows them; on ranks other than 0 every method returns at once.

    A run that resumes after `first_step` drops what was written for later steps and continues the same curves.
    """

    def __init__(self, run_dir: Path, rank: int, steps: int, first_step: int = 0, display: Display | None = None) -> None:
        self._silent = rank != 0
        if self._silent:
            return
        self._metrics = run_dir / METRICS_FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        _keep_until(self._metrics, first_step)
        self._writer = SummaryWriter(run_dir / EVENTS_DIR, purge_step=first_step + 1, flush_secs=10)
        self._display = display or Display(steps, first_step)

    def tick(self, step: int) -> None:
        """Moves the progress bar after a step; touches no tensor."""
        if not self._silent:
            self._display.tick(step)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Writes and shows the figures of a logging interval that ends with `step`; memory and compilations are added here."""
        if self._silent:
            return
        values = {**values, **memory(), "compilations": compilations()}
        self._scalars(step, "train", values)
        self._display.log(step, values)

    def log_validation(self, step: int, name: str, values: Mapping[str, float], examples: Sequence[tuple[str, str]] = (),
                       mel_MA: Tensor | None = None) -> None:
        """Writes and shows the figures of the validation set `name`.

        `examples` are pairs of reference and hypothesis; `mel_MA` [mel bins, frames] is the picture of one utterance.
        """
        if self._silent:
            return
        self._scalars(step, f"validation/{name}", values)
        figures = "  ".join(f"{key} {_number(value)}" for key, value in values.items())
        self._display.note(f"validation {name} at step {step}: {figures}")
        if examples:
            self._writer.add_text(f"validation/{name}/transcripts", _table(examples), step)
            for reference, hypothesis in examples[:EXAMPLES_ON_SCREEN]:
                self._display.note(f"  said  {reference}\n  heard {hypothesis}")
        if mel_MA is not None:
            self._writer.add_image(f"validation/{name}/mel", _picture(mel_MA), step, dataformats="HW")

    def note(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if not self._silent:
            self._display.note(text)

    def close(self) -> None:
        """Writes what is buffered and gives the terminal back."""
        if not self._silent:
            self._display.close()
            self._writer.close()

    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        named = {f"{group}/{key}": value for key, value in values.items()}
        for tag, value in named.items():
            self._writer.add_scalar(tag, value, step)
        finite = {tag: value if math.isfinite(value) else None for tag, value in named.items()}  # JSON has no NaN
        with self._metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")


def _keep_until(metrics: Path, step: int) -> None:
    if not metrics.exists():
        return
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]  # a killed run may leave half a line
    complete = metrics.with_suffix(".new")
    complete.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    complete.replace(metrics)


def _table(examples: Sequence[tuple[str, str]]) -> str:
    rows = (f"| {_cell(reference)} | {_cell(hypothesis)} |" for reference, hypothesis in examples)
    return "\n".join(("| reference | hypothesis |", "|---|---|", *rows))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"


def _picture(mel_MA: Tensor) -> Tensor:
    """Grey levels in [0, 1], low frequencies at the bottom."""
    mel_MA = mel_MA.detach().float().cpu().flip(0)
    low, high = mel_MA.aminmax()
    return (mel_MA - low) / (high - low).clamp(min=1e-6)
