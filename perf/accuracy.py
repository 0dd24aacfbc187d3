"""Worst relative error of every operation, implementation and case against the reference in fp64, results and gradients.

In bf16 an error is compared with that of the same formula in plain PyTorch: the reference, computing in bf16 what it computes in fp32.
"""

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from perf import report
from perf.calls import Call, attempted, differentiable, error, unavailable, withheld
from perf.cases import Case, Operation, operations

ROUNDING = 2.0**-9  # of a bf16 number: a plain result that happens to be closer counts as this far
WORST_FP32, WORST_BF16 = 1e-5, 2.0


def run(implementation: str | None = None, only: Sequence[str] = ()) -> tuple[dict[str, Any], bool]:
    """The worst errors and where they are; `implementation` restricts to one, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        from perf.interpreter import make_strict

        make_strict()
    records = [record for operation in operations(only)
               for name in operation.implementations
               if name != "reference" and implementation in (None, name)
               and (not unavailable(operation, name, device) or (interpreted and name == "triton"))
               for case in operation.having("accuracy") for record in case_records(operation, name, case, device)]
    if implementation is None and device.type == "cpu":
        records += _interpreted(only)
    if implementation is not None:
        return {"records": records}, True
    return _summary(records)


def case_records(operation: Operation, implementation: str, case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """Error of each result and gradient, in fp32 and in bf16; none where the implementation cannot run.

    A crash is an infinite error, so that it hides nothing of the other cases.
    """
    for dtype in (torch.float32, torch.bfloat16):
        named = {"operation": operation.name, "implementation": implementation, "case": case.name,
                 "dtype": str(dtype).removeprefix("torch.")}
        call = Call.drawn(operation, case, device, dtype)
        try:
            yield from (named | record for record in _errors(call, implementation))
        except Exception as failure:
            traceback.print_exc()
            yield named | {"result": type(failure).__name__, "error": math.inf,
                           "over_torch": math.inf if dtype == torch.bfloat16 else None}


def _errors(call: Call, implementation: str) -> Iterator[dict[str, Any]]:
    through, missing = attempted(call.operation, implementation, functools.partial(differentiable, call, implementation))
    if missing:
        return
    got, exact = call.results(implementation, through), call.widened().results("reference", through)
    plain = _plain(call, through) if call.dtype == torch.bfloat16 else {}
    for name, value in got.items():
        if exact[name].is_floating_point() and not withheld(call.operation, implementation, name, value):
            relative = error(value, exact[name])
            ratio = relative / max(error(plain[name], exact[name]), ROUNDING) if plain else None
            yield {"result": name, "error": relative, "over_torch": ratio}


def _plain(call: Call, through: Sequence[int]) -> dict[str, torch.Tensor]:
    """Results of the reference without its conversions to fp32, or with them where its products need one dtype."""
    functions = call.operation.function, call.operation.implementations["reference"]
    modules = [module for module in {sys.modules[function.__module__] for function in functions} if hasattr(module, "widen")]
    with contextlib.ExitStack() as narrow, contextlib.suppress(RuntimeError):
        for module in modules:
            narrow.enter_context(mock.patch.object(module, "widen", lambda x: x))
        return call.results("reference", through)
    return call.results("reference", through)


def _interpreted(only: Sequence[str]) -> list[dict[str, Any]]:
    """Records of the Triton versions, from a process in which Triton interprets."""
    command = [sys.executable, "-m", "perf", "accuracy", "--implementation", "triton", *(["--only", *only] if only else [])]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["records"]


def _summary(records: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        row = rows.setdefault((record["operation"], record["implementation"]), {
            "operation": record["operation"], "implementation": record["implementation"], "fp32": 0.0, "bf16 / torch": 0.0, "results": 0})
        key, value = ("fp32", record["error"]) if record["dtype"] == "float32" else ("bf16 / torch", record["over_torch"])
        row[key], row["results"] = max(row[key], value), row["results"] + 1
    report.show("Worst relative error against fp64", list(rows.values()))
    fp32 = max((r for r in records if r["dtype"] == "float32"), key=lambda r: r["error"])
    bf16 = max((r for r in records if r["dtype"] != "float32"), key=lambda r: r["over_torch"])
    where = [" ".join(r[key] for key in ("operation", "implementation", "case", "result")) for r in (fp32, bf16)]
    result = {"worst_fp32": fp32["error"], "worst_bf16_over_torch": round(bf16["over_torch"], 3), "fp32_at": where[0], "bf16_at": where[1],
              "results": len(records)}
    return result, fp32["error"] <= WORST_FP32 and bf16["over_torch"] <= WORST_BF16
