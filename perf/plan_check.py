"""What plan.py predicts against what gloo processes do: memory by the profiler's allocation events, bytes by the collectives issued."""

from typing import Any

from perf.report import show
from tests.dist.launch import torchrun

FULL = ["train.activation_checkpointing=full", "train.activation_checkpointing_encoder=full"]
SELECTIVE = ["train.activation_checkpointing=selective", "train.activation_checkpointing_encoder=selective"]
COMPILED, ALL_TO_ALL, RING = "compile.enabled=true", "parallel.ep_dispatch=alltoall", "parallel.cp_attention=ring"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp 2": (2, []),
    "dp 2, compiled": (2, [COMPILED]),
    "zero 2": (2, ["parallel.zero_stage=2"]),
    "tp 2": (2, ["parallel.tp=2"]),
    "tp 2, recomputed": (2, ["parallel.tp=2", *FULL]),
    "tp 2, recomputed, compiled": (2, ["parallel.tp=2", *FULL, COMPILED]),
    "ep 2, recomputed in part": (2, ["parallel.ep=2", *SELECTIVE]),
    "ep 2, recomputed in part, compiled": (2, ["parallel.ep=2", *SELECTIVE, COMPILED]),
    "ep 4": (4, ["parallel.ep=4"]),
    "hsdp 2 x 2, ep 2, all to all": (4, ["parallel.dp_replicate=2", "parallel.ep=2", ALL_TO_ALL]),
    "ep 4, all to all, padding": (4, ["parallel.ep=4", ALL_TO_ALL]),
    "dp 2, cp 2, tp 2, ep 8": (8, ["parallel.cp=2", "parallel.tp=2", "parallel.ep=8"]),
    "cp 2, ring": (2, ["parallel.cp=2", RING]),
    "cp 4, ring, compiled": (4, ["parallel.cp=4", RING, COMPILED]),
    "pp 2, dp 2": (4, ["parallel.pp=2", "train.accumulate=3"]),
}
UTTERANCES, FEW = 12, 8  # of a row: full, or with padding
BARS = {"state_error": 0.01, "activation_error": 0.15, "bytes_error": 0.05}


def run(only: list[str]) -> tuple[dict[str, Any], bool]:
    """The largest relative error of each kind, and whether all stay within their bars."""
    rows = []
    for name in only or LAYOUTS:
        processes, overrides = LAYOUTS[name]
        utterances = FEW if "padding" in name else UTTERANCES
        for found in torchrun(processes, "perf.plan_check_worker", str(utterances), *overrides, timeout_sec=3600):
            rows.append({"layout": name} | {f"{what}, {which}": value for what, pair in found.items() for which, value in pair.items()})
    show("bytes", rows)
    errors = {f"{what}_error": max((error(row, what) for row in rows), default=0.0) for what in ("state", "activation", "bytes")}
    return {key: round(value, 4) for key, value in errors.items()}, all(errors[key] <= bar for key, bar in BARS.items())


def error(row: dict[str, Any], what: str) -> float:
    """Of the prediction; 0 for what this layout's run does not measure."""
    key = f"{what}, measured"
    return abs(row[f"{what}, predicted"] / row[key] - 1) if key in row else 0.0
