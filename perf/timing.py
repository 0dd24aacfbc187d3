"""How long calls take."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, by the host's clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(calls: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int) -> dict[str, float]:
    """Median seconds of each of some calls that take turns, after `warm_up` rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            taken = seconds(call)
            if turn >= warm_up:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def device_seconds(call: Callable[[], Any], warmup_ms: int, measure_ms: int) -> float:
    """Median over calls on a GPU whose cache is empty."""
    from triton.testing import do_bench

    return 1e-3 * do_bench(call, warmup=warmup_ms, rep=measure_ms, return_mode="median")
