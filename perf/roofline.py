"""The roofline: least times of real shapes from their FLOPs and bytes, and a plot of what was reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.cases import Operation

H200_FLOPS, H200_BYTES = 790e12, 4.3e12  # a second: bf16 products of random numbers, and copies, as measured on one


def estimates(operations: Sequence[Operation], flops: float = H200_FLOPS, bandwidth: float = H200_BYTES) -> list[dict[str, Any]]:
    """One row for each pass of each "model" case."""
    rows = []
    for operation in operations:
        for case in operation.having("model"):
            for name, work in (("forward", case.forward), ("backward", case.backward)):
                if work is not None:
                    floor = work.seconds(flops, bandwidth)
                    rows.append({"operation": operation.name, "case": case.name, "pass": name, "GFLOP": work.flops / 1e9,
                                 "MB": work.bytes / 1e6, "floor ms": 1e3 * floor,
                                 "bound": "arithmetic" if work.flops / flops >= work.bytes / bandwidth else "memory"})
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str, flops: float, bandwidth: float) -> None:
    """Points (FLOP a byte, TFLOP/s) under the two roofs. Rows have GFLOP, MB and either ms, what was measured, or the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    intensities = [10 ** (i / 20) for i in range(-20, 81)]
    axes.plot(intensities, [min(flops, bandwidth * x) / 1e12 for x in intensities], color="black")
    for name in dict.fromkeys(row["operation"] for row in rows):
        points = [row for row in rows if row["operation"] == name and row["GFLOP"] > 0]
        axes.scatter([1e3 * row["GFLOP"] / row["MB"] for row in points],
                     [row["GFLOP"] / (row["ms"] if "ms" in row else row["floor ms"]) for row in points], label=name, s=18)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
