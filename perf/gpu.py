"""Operations on a GPU at the shapes of real models, against the libraries that are installed and against the device's own rates.

Times are medians of Triton's do_bench, which empties the cache between runs; a product of random bf16 matrices and a copy, measured in the
same process, are the roofs. Nothing is called faster than something it disagrees with: results and gradients are compared first, with the
reference on small cases and with every library on the case itself.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from perf import report, roofline
from perf.accuracy import WORST_BF16, WORST_FP32, case_records
from perf.calls import Call, attempted, differentiable, error, unavailable, withheld
from perf.cases import Case, Operation, Work, operations
from perf.timing import device_seconds

AGREEMENT = 2e-2  # of bf16 results and gradients, relative
_seconds = functools.partial(device_seconds, warmup_ms=50, measure_ms=300)
NO_GPU = "No CUDA device here: python -m perf gpu measures on one; python -m perf compile says what can be said without."


def run(only: Sequence[str] = (), save: bool = False) -> tuple[dict[str, Any], bool]:
    """A row for each operation, case, implementation and pass; speed-ups over each library by name."""
    if not torch.cuda.is_available():
        print(NO_GPU)
        return {"device": None, "reason": NO_GPU}, False
    device = torch.device("cuda")
    flops, bandwidth = product_rate(device), copy_rate(device)
    rows, wrong = [], []
    for operation in operations(only):
        wrong += list(_inaccurate(operation, device))
        for case in operation.having("model"):
            rows += _rows(operation, case, device, flops, bandwidth)
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    report.show(f"{name}: products {flops / 1e12:.0f} TFLOP/s, copies {bandwidth / 1e12:.2f} TB/s", rows)
    for sentence in wrong:
        print(sentence)
    if save:
        _save(rows, name, flops, bandwidth)
    disagreeing = [row for row in rows if row["speed-up"] == "disagrees"]
    return {"device": name, "product_tflops": round(flops / 1e12, 1), "copy_tbs": round(bandwidth / 1e12, 3), "wrong": len(wrong),
            "disagreeing": len(disagreeing),
            "share_of_floor": {f"{row['operation']}, {row['case']}, {row['pass']}": row["share"] for row in rows
                               if row["implementation"] == "triton" and row["share"] != ""},
            "speed_up": {f"{row['operation']}, {row['case']}, {row['pass']}, {row['implementation']}": row["speed-up"] for row in rows
                         if isinstance(row["speed-up"], float)}}, not wrong and not disagreeing


def product_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a square bf16 product of random numbers; zeros would draw less power and run faster."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    return 2 * size**3 / _seconds(lambda: a @ b)


def copy_rate(device: torch.device, size: int = 2**31) -> float:
    """Bytes a second read and written by a copy on the device."""
    source, target = (torch.empty(size, device=device, dtype=torch.uint8) for _ in "st")
    return 2 * size / _seconds(lambda: target.copy_(source))


def _inaccurate(operation: Operation, device: torch.device) -> Iterator[str]:
    """A sentence for each small case in which our GPU version is too far from the reference."""
    if "triton" not in operation.implementations:
        return
    for case in operation.having("accuracy"):
        for record in case_records(operation, "triton", case, device):
            narrow = record["over_torch"] is not None
            if not (record["over_torch"] <= WORST_BF16 if narrow else record["error"] <= WORST_FP32):
                yield f"{operation.name}, {case.name}, {record['dtype']}: {record['result']} is off by {record['error']:.2g}"


def _rows(operation: Operation, case: Case, device: torch.device, flops: float, bandwidth: float) -> list[dict[str, Any]]:
    """Ours first; a library's speed-up is its time over ours."""
    names = [name for name in operation.implementations if name != "reference" and not unavailable(operation, name, device)]
    names.sort(key=lambda name: name != "triton")
    call = Call.drawn(operation, case, device, torch.bfloat16)
    rows, ours, expected = [], {}, None
    for name in names:
        measured, reason = _measured(call, name)
        if measured is None:
            print(f"{operation.name}, {case.name}: no {name} ({reason})")
            continue
        times, results = measured
        if name == "triton":
            ours, expected = times, results
        differs = 0.0 if expected is None else _difference(call, name, results, expected)
        for number, seconds in times.items():
            rows.append(_row(operation, case, name, number, seconds, flops, bandwidth) | {
                "speed-up": "" if name == "triton" or not ours else "disagrees" if differs > AGREEMENT else seconds / ours[number],
                "difference": differs})
        del results, measured
    return rows


def _difference(call: Call, name: str, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest, over what both computed."""
    return max((error(got[key], value) for key, value in expected.items()
                if key in got and not withheld(call.operation, name, key, got[key])), default=0.0)


def _measured(call: Call, name: str) -> tuple[tuple[dict[str, float], dict[str, torch.Tensor]] | None, str]:
    """Seconds by pass and results, or why there are none."""
    def measure() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        through = differentiable(call, name)
        results = call.results(name, through[:1])
        forward = _seconds(lambda: call.forward(name))
        both = _seconds(lambda: call.backward(call.forward(name), through[:1]))
        return {"forward": forward, "forward + backward": both}, results

    try:
        return attempted(call.operation, name, measure)
    except torch.cuda.OutOfMemoryError:
        return None, "out of memory"


def _row(operation: Operation, case: Case, name: str, number: str, seconds: float, flops: float, bandwidth: float) -> dict[str, Any]:
    works = [case.forward] if number == "forward" else [case.forward, case.backward]
    known = [work for work in works if work is not None]
    work = Work(sum(w.flops for w in known), sum(w.bytes for w in known)) if len(known) == len(works) else None
    return {"operation": operation.name, "case": case.name, "implementation": name, "pass": number, "ms": 1e3 * seconds,
            "TFLOP/s": work.flops / seconds / 1e12 if work else "", "TB/s": work.bytes / seconds / 1e12 if work else "",
            "share": round(sum(w.seconds(flops, bandwidth) for w in known) / seconds, 3) if work else ""}


def _save(rows: list[dict[str, Any]], name: str, flops: float, bandwidth: float) -> None:
    folder: Path = report.save("operations", rows, name)
    points = [{**row, "GFLOP": row["TFLOP/s"] * row["ms"], "MB": 1e3 * row["TB/s"] * row["ms"]} for row in rows
              if row["implementation"] == "triton" and row["TFLOP/s"] != ""]
    roofline.plot(points, folder / "roofline.png", name, flops, bandwidth)
    print(f"saved in {folder}")
