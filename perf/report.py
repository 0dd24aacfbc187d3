"""Tables on screen, and as CSV under perf/results/<device>/, beside a JSON file with the date and the versions they were made with."""

import csv
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


def show(title: str, rows: Sequence[Row]) -> None:
    """One line a row, columns in the order of the first row's keys."""
    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if isinstance(rows[0][name], (int, float)) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 180).print(table)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def save(name: str, rows: Sequence[Row], device: str) -> Path:
    """Writes <name>.csv, the rows, and <name>.json, how they were made, into the device's folder; the folder."""
    folder = RESULTS / "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.json").write_text(json.dumps(circumstances(device), indent=1) + "\n")
    return folder


def circumstances(device: str) -> dict[str, str]:
    """Device, date and versions."""
    try:
        import triton
    except ImportError:
        version = "none"
    else:
        version = triton.__version__
    return {"device": device, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "triton": version,
            "cuda": str(torch.version.cuda), "python": platform.python_version()}
