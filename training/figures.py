"""The picture of a run: `python -m training.figures RUN_DIR OUT.png` draws its loss and word error rate from the event files."""

import sys
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.telemetry import EVENTS_DIR

INK, GRID = "#333333", "#dddddd"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito: distinct for colour-blind readers too


class Curve(NamedTuple):
    steps: list[int]
    values: list[float]


def read(run_dir: Path) -> dict[str, Curve]:
    """Every scalar of the event files of a run, by its name."""
    events = EventAccumulator(str(run_dir / EVENTS_DIR), size_guidance={"scalars": 0}).Reload()
    curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: Curve([point.step for point in points], [point.value for point in points]) for tag, points in curves.items()}


def by_set(curves: Mapping[str, Curve], figure: str) -> dict[str, Curve]:
    """The curves of validation/<set>/<figure>, by set."""
    return {tag.split("/")[1]: curve for tag, curve in curves.items() if tag.startswith("validation/") and tag.endswith(f"/{figure}")}


def draw(curves: Mapping[str, Curve], out: Path) -> None:
    """Two panels side by side: loss, and word error rate of every validation set."""
    figure, (loss, wer) = plt.subplots(1, 2, sharex=True, figsize=(10, 3.6), layout="constrained", dpi=160)
    if "train/loss" in curves:
        loss.plot(*curves["train/loss"], color="#999999", linewidth=1, label="training")
    datasets = sorted({*by_set(curves, "loss"), *by_set(curves, "wer")})
    colours = dict(zip(datasets, cycle(LINES), strict=False))
    for axes, name, unit in ((loss, "loss", 1), (wer, "wer", 100)):
        for dataset, (steps, values) in by_set(curves, name).items():
            shown = [unit * value for value in values]
            axes.plot(steps, shown, color=colours[dataset], linewidth=1.8, marker="o", markersize=3, label=f"{dataset} (validation)")
    _dress(loss, "Loss per token")
    _dress(wer, "Word error rate, %")
    figure.savefig(out)
    plt.close(figure)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("step", color=INK)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=INK)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python -m training.figures RUN_DIR OUT.png")
    run_dir, out = map(Path, arguments)
    if not (run_dir / EVENTS_DIR).is_dir():
        sys.exit(f"{run_dir} holds no {EVENTS_DIR} folder: name the run_dir of a run that has started")
    draw(read(run_dir), out)
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
