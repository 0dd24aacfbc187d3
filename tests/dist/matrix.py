"""Every layout against one process: `python -m tests.dist.matrix [--precision fp32|fp64] [--cells PATTERN] [--backend NAME] [--write]`;
the last line is one JSON object.

The cells of one world size run one after the other in the same processes. --write enters what has passed into the table of
docs/parallelism.md: of fp32 the four errors, of fp64 the largest of them.
"""

import argparse
import fnmatch
import json
import math
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from parallel.mesh import start_processes
from tests.dist.cells import Cell, cells
from tests.dist.launch import ROOT, torchrun
from tests.dist.matrix_worker import file_of, run

BARS = {  # errors above which a cell has failed
    "fp32": {"loss_error": 1e-6, "gradient_error": 1e-5, "norm_error": 1e-6, "state_error": 1e-4},
    "fp64": {"loss_error": 1e-9, "gradient_error": 1e-9, "norm_error": 1e-9, "state_error": 1e-9},
}
COLUMNS = ("cell", "processes", "run", "loss", "gradients", "norm", "state after 3 steps", "fp64, largest")
PAGE, START, END = ROOT / "docs/parallelism.md", "<!-- matrix -->", "<!-- end of matrix -->"


def measure(chosen: Sequence[Cell], precision: str, backend: str = "inductor") -> dict[str, dict[str, Any]]:
    """Errors of the cells, by name. The references are computed in this process.

    :param backend: of torch.compile, for the cells that are compiled
    """
    results: dict[str, dict[str, Any]] = {}
    start_processes(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for reference in {cell.reference.name: cell.reference for cell in chosen}.values():
            torch.save(run(reference, precision), file_of(folder, reference, precision))
        for world in sorted({cell.world for cell in chosen}):
            names = [cell.name for cell in chosen if cell.world == world]
            results |= torchrun(world, "tests.dist.matrix_worker", folder, precision, backend, *names, timeout_sec=7200)
    return results


def failed(result: dict[str, Any], precision: str) -> bool:
    """Whether a cell did not run or is over a bar; an error that is not a number is over it."""
    return "failure" in result or not all(result[name] <= bar for name, bar in BARS[precision].items())


def summary(results: dict[str, dict[str, Any]], precision: str) -> dict[str, Any]:
    """The figures."""
    ran = [r for r in results.values() if "failure" not in r]
    worst = {f"max_{name}": max((r[name] for r in ran), default=math.nan) for name in BARS[precision]}
    return {"cells": len(results), "failed": [name for name, r in results.items() if failed(r, precision)], **worst}


def table(before: str, results: dict[str, dict[str, Any]], precision: str, backend: str) -> str:
    """The rows of docs/parallelism.md with the errors of the cells that have passed; the others stay as they were, if there is such a cell."""
    known = {row[0]: row for row in ([part.strip() for part in line.strip("| ").split(" | ")] for line in before.splitlines()[2:])}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for cell in cells():
        row = known.get(cell.name, ["-"] * len(COLUMNS))
        if cell.name in results and not failed(results[cell.name], precision):
            errors = [f"{results[cell.name][name]:.1e}" for name in BARS[precision]]
            row[:3] = cell.name, str(cell.world), backend if cell.compiled else "eager"
            row[3:] = [*errors, row[-1]] if precision == "fp32" else [*row[3:-1], max(errors, key=float)]
        lines += [f"| {' | '.join(row)} |"] if row[0] != "-" else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=BARS, default="fp32")
    parser.add_argument("--cells", default="*")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if fnmatch.fnmatch(cell.name, options.cells)]
    results = measure(chosen, options.precision, options.backend)
    figures = summary(results, options.precision)
    for name, result in results.items():
        marks = result.get("failure") or "  ".join(f"{key} {result[key]:.1e}" for key in BARS[options.precision])
        print(f"{'FAILED' if name in figures['failed'] else 'ok    '} {name}: {marks}")
    if options.write:
        before, rows, after = re.split(f"{START}\n|\n{END}", PAGE.read_text())
        PAGE.write_text(f"{before}{START}\n{table(rows, results, options.precision, options.backend)}\n{END}{after}")
    print(json.dumps(figures | {"failed": len(figures["failed"])}))


if __name__ == "__main__":
    main()
