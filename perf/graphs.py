"""What is compiled, sent and waited for in a training step of a small hybrid model, by layout.

Each layout runs twice on gloo processes of this machine. Compiled: graphs, breaks, recompilations, and the collectives inside the graphs
and between them, in the order in which a step issues them. Eagerly, with a GPU's kernels in Triton's interpreter: where the host waits for
the value of a tensor, inside custom operators too.
"""

from typing import Any

from perf.report import show
from tests.dist.launch import torchrun

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {  # processes, and parallel.<key>
    "dp": (2, {}),
    "hsdp": (4, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "ep_alltoall": (2, {"ep": 2, "ep_dispatch": "alltoall"}),
    "ep_allgather": (2, {"ep": 2}),
}
REDUCED = {"hsdp": 4}  # collectives a layer at most where gradients are also summed over copies; else 3: gather, gather again, reduce


def run(only: list[str], order: bool) -> tuple[dict[str, Any], bool]:
    """An object for each layout, and whether each stays within its bars.

    :param order: also print what a step does in which order
    """
    results = {}
    for name in only or LAYOUTS:
        processes, keys = LAYOUTS[name]
        overrides = [f"parallel.{key}={value}" for key, value in keys.items()]
        compiled = torchrun(processes, "perf.graphs_worker", "compiled", *overrides, timeout_sec=3600)
        waits = torchrun(processes, "perf.graphs_worker", "waits", *overrides, timeout_sec=3600, TRITON_INTERPRET="1")
        events = compiled.pop("order")
        if order:
            show(f"{name}: a step", [dict(zip(("what", "gathers under way", "sums under way"), event, strict=True)) for event in events])
        show(f"{name}: collectives inside a graph", [{"graph": graph, **ways} for graph, ways in compiled["collectives_in_graphs"].items()])
        results[name] = compiled | waits
    return results, all(good(name, result) for name, result in results.items())


def good(name: str, result: dict[str, Any]) -> bool:
    """No break, no recompilation, and no wait of the host but for the sizes of each all-to-all; few enough collectives between the graphs,
    and under cp two in Mamba-2's forward pass and two in its backward pass."""
    waits = result["expert_layers"] if name == "ep_alltoall" else 0
    mamba = result["collectives_in_graphs"]["mamba.forward"]
    return (result["breaks"] == result["recompiles"] == 0 and result["host_syncs"] == waits
            and result["collectives_per_layer"] <= REDUCED.get(name, 3)
            and (name != "cp" or mamba == {"forward": 2, "backward": 2}))
