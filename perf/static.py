"""Every kernel in every configuration compiled for every architecture, without a GPU: does it build, fit and keep to its registers?

The default configurations are those of tuned.json, in bf16 and fp32; the others are the candidates that `python -m perf tune` tries, in
bf16. A candidate that does not fit an architecture's shared memory is no failure: the tuner leaves it out there.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels import launch
from perf import report, roofline
from perf.ahead_of_time import Kernel, compiled_kernels
from perf.calls import Call
from perf.cases import Case, Operation, operations

TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


@dataclass
class Variant:
    """One kernel as one case launches it."""

    operation: str
    case: str
    default: bool
    kernel: Kernel

    def row(self) -> dict[str, Any]:
        k = self.kernel
        return {"operation": self.operation, "kernel": k.name, "case": self.case, "types": " ".join(sorted(set(k.types))), "sm": k.arch,
                "default": "yes" if self.default else "", "tiles": " ".join(f"{n}={v}" for n, v in k.constants.items() if "BLOCK" in n),
                "warps": k.warps, "stages": k.stages, "registers": k.registers, "spill": k.spill_bytes, "shared": k.shared_bytes,
                "occupancy": round(k.occupancy, 2), "instructions": " ".join(f"{n}:{c}" for n, c in k.instructions.items()),
                "error": k.error[:200]}


def variants(operation: Operation, arch: int, candidates: bool,
             dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)) -> Iterator[Variant]:
    """What the operation's "compile" cases launch, candidates in bf16 alone; each compiled kernel once."""
    seen: set[str] = set()
    for name, choice in [("", {}), *((name, choice) for name, choices in operation.candidates.items() for choice in choices if candidates)]:
        for case in operation.having("compile"):
            for dtype in (torch.bfloat16,) if name else dtypes:
                call = _call(operation, case, dtype)
                with launch.forced(name, choice) if name else nullcontext():
                    kernels = compiled_kernels(call, arch, only=name)
                for kernel in kernels:
                    identity = repr(kernel)
                    if identity not in seen:
                        seen.add(identity)
                        yield Variant(operation.name, case.name, not name, kernel)


def _call(operation: Operation, case: Case, dtype: torch.dtype) -> Callable[[], Any]:
    call = Call.drawn(operation, case, torch.device("cpu"), dtype)
    return lambda: call.results("triton")


def problems(variant: Variant, products: frozenset[str]) -> list[str]:
    """What is wrong with a variant that may be launched."""
    kernel = variant.kernel
    if kernel.error:
        return [f"does not compile: {kernel.error}"]
    found = [] if kernel.fits else [f"needs {kernel.shared_bytes} bytes of shared memory"]
    if variant.default and kernel.spill_bytes:
        found.append(f"spills {kernel.spill_bytes} bytes")
    wanted = TENSOR_CORES[kernel.arch]
    if variant.default and kernel.name in products and kernel.types[0] in ("*bf16", "*fp16") and not kernel.instructions.get(wanted):
        found.append(f"has no {wanted}")
    return found


def run(arches: Sequence[int], candidates: bool = True, save: bool = False, only: Sequence[str] = ()) -> tuple[dict[str, Any], bool]:
    """Counts over all variants; the table names those with problems, or is saved whole."""
    chosen = [o for o in operations(only) if "triton" in o.implementations]
    tasks = [(operation.name, arch, candidates) for operation in chosen for arch in arches]
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        found = [variant for part in pool.map(_task, tasks) for variant in part]
    products = frozenset().union(*(o.products for o in chosen))
    rows = [variant.row() for variant in found]
    report.show("Default configurations", [_short(row) for row in rows if row["default"]])
    bad = [(variant, problem) for variant in found if variant.default for problem in problems(variant, products)]
    for variant, problem in bad:
        print(f"{variant.operation} {variant.kernel.name} sm_{variant.kernel.arch} ({variant.case}) {problem}")
    floors = roofline.estimates(chosen)
    report.show("Least times on an H200, estimated: 790 TFLOP/s, 4.3 TB/s", floors)
    if save:
        device = f"compiled by triton {triton.__version__}"
        folder = report.save("kernels", rows, device)
        report.save("floors", floors, device)
        roofline.plot(floors, folder / "roofline.png", "Least times on an H200, estimated", roofline.H200_FLOPS, roofline.H200_BYTES)
        print(f"saved in {folder}")
    usable = [v for v in found if v.default or v.kernel.fits]
    result = {"kernels": len({(v.operation, v.kernel.name) for v in found}), "variants": len(usable),
              "failed": sum(bool(v.kernel.error) for v in found), "over_shared_memory": sum(not v.kernel.fits for v in usable),
              "default_spills": sum(v.kernel.spill_bytes > 0 for v in found if v.default), "candidates_left_out": len(found) - len(usable),
              "architectures": list(arches)}
    return result, not bad and not result["failed"]


def _task(task: tuple[str, int, bool]) -> list[Variant]:
    name, arch, candidates = task
    torch.set_num_threads(1)
    return list(variants(operations([name])[0], arch, candidates))


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("kernel", "case", "types", "sm", "tiles", "warps", "registers", "spill", "shared", "occupancy",
                                      "instructions")}
