"""Times the candidates of every kernel on the GPU that is here and writes the best of each shape class into the operation's tuned.json.

One kernel after another, forward and backward of each "model" case, the other kernels as they are in the table. A candidate counts only if
its results agree with those of the table's choice.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kernels import launch
from perf import report
from perf.calls import Call, error
from perf.cases import Operation, operations
from perf.timing import device_seconds

GAIN = 1.02  # that a candidate needs, so that noise rewrites nothing
AGREEMENT = 1e-2
NO_GPU = "No CUDA device here: python -m perf tune needs the device that it tunes for."

Choice = Mapping[str, int]


def run(only: Sequence[str] = ()) -> tuple[dict[str, Any], bool]:
    """What was changed, by operation, kernel and shape class."""
    if not torch.cuda.is_available():
        print(NO_GPU)
        return {"device": None, "reason": NO_GPU}, False
    device = torch.device("cuda")
    rows = []
    for operation in operations(only):
        if operation.candidates:
            rows += list(_tuned(operation, device))
    report.show(torch.cuda.get_device_name(), rows)
    return {"device": torch.cuda.get_device_name(), "changed": sum(row["gain"] >= GAIN for row in rows), "classes": len(rows)}, True


def _tuned(operation: Operation, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rewrites the operation's table; a row for each kernel and shape class that its cases use."""
    table = copy.deepcopy(launch.table(operation.name))
    seen: set[tuple[str, str]] = set()
    for case in operation.having("model"):
        call = Call.drawn(operation, case, device, torch.bfloat16)
        with launch.asked() as used:
            expected = call.results("triton")
        for kernel, shape in sorted(used - seen):
            seen.add((kernel, shape))
            choice, gain = _best(call, kernel, operation.candidates.get(kernel, ()), expected)
            if choice:
                table[kernel][shape][f"sm_{launch.architecture(device)}"] = dict(choice)
            yield {"operation": operation.name, "kernel": kernel, "class": shape, "case": case.name, "gain": gain,
                   "choice": str(choice or "")}
        del call, expected
        torch.cuda.empty_cache()
    launch.path(operation.name).write_text(json.dumps(table, indent=1) + "\n")
    launch.table.cache_clear()


def _best(call: Call, kernel: str, candidates: Sequence[Choice], expected: dict[str, torch.Tensor]) -> tuple[Choice | None, float]:
    """The fastest candidate and how many times as fast as the present choice it is; none if that is the fastest."""
    before = _seconds(call)
    best, least = None, before / GAIN
    for choice in candidates:
        with launch.forced(kernel, choice):
            seconds = _seconds_if_right(call, expected)
        if seconds < least:
            best, least = choice, seconds
    return best, before / least if best else 1.0


def _seconds(call: Call) -> float:
    return device_seconds(lambda: call.results("triton"), warmup_ms=25, measure_ms=100)


def _seconds_if_right(call: Call, expected: dict[str, torch.Tensor]) -> float:
    """Infinite for a candidate that cannot be launched here or computes something else."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    try:
        got = call.results("triton")
    except (CompilationError, OutOfResources):
        return float("inf")
    return _seconds(call) if all(error(got[name], value) <= AGREEMENT for name, value in expected.items()) else float("inf")
