"""One process against two, experts split or not: `python -m tests.dist.first [overrides]`; the last line is one JSON object.

The error of a parameter's gradient g against r is |g - r| / max(|r|, 1e-3 |all r| / sqrt(number of tensors)): some true gradients are 0.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.dist.launch import torchrun

RUNS = {"one": (1, "digits", 2), "ep2": (2, "digits_ep2", 1), "fsdp2": (2, "digits", 1)}  # processes, experiment, rows a rank


def worst(errors: Iterable[float]) -> float:
    """The largest, which is NaN if one is: `max` would pass over it."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def gradient_error(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest error of any parameter."""
    norm = math.sqrt(sum(r.double().square().sum().item() for r in reference.values()))
    floor = 1e-3 * norm / math.sqrt(len(reference))
    return worst((grads[n].double() - r.double()).norm().item() / max(r.double().norm().item(), floor) for n, r in reference.items())


def compare(overrides: list[str]) -> dict[str, Any]:
    """The figures of all runs together."""
    with tempfile.TemporaryDirectory() as folder:
        printed = {name: torchrun(n, "tests.dist.first_worker", f"{folder}/{name}", experiment, str(rows),
                                  "-" if name == "one" else f"{folder}/one", *overrides) for name, (n, experiment, rows) in RUNS.items()}
        saved = {name: torch.load(Path(folder) / name) for name in RUNS}
    one, others = saved["one"], [name for name in RUNS if name != "one"]
    loss_errors = [abs(a - b) / abs(b) for name in others for a, b in zip(printed[name]["losses"], printed["one"]["losses"], strict=True)]
    return {
        "loss_error": worst(loss_errors),
        "gradient_error": worst(gradient_error(saved[name][when], one[when]) for name in others for when in ("first", "last")),
        "start_bit_equal": all(torch.equal(saved[name]["start"][p], one["start"][p]) for name in others for p in one["start"]),
        "gathered_layers_live_max": max(printed[name]["live_max"] for name in others),
        "dense_collectives_per_layer": max(printed[name]["collectives_per_layer"] for name in others),
    }


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1:])))
