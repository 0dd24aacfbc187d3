"""Dense products; on a GPU these are PyTorch's own and give the rate that others are compared with."""

from typing import Any

from kernels.linear import IMPLEMENTATIONS, linear
from perf.cases import Case, Draw, Operation, Use, Work


def _case(name: str, use: Use, rows: int, wide: int, out: int, bias: bool) -> Case:
    def inputs(draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(rows, wide), "w_OI": draw.normal(out, wide, std=wide**-0.5), "bias": draw.normal(out) if bias else None}

    product, size = 2.0 * rows * wide * out, 2.0 * (rows * wide + wide * out + rows * out)
    return Case(name, use, inputs, ("x", "w_OI", "bias") if bias else ("x", "w_OI"), Work(product, size), Work(2 * product, 2 * size))


CASES = [
    _case("odd sizes", "accuracy", 19, 23, 29, bias=True),
    _case("Nemotron-3-Nano 8k, Mamba input", "model", 8192, 2688, 10304, bias=False),
]

OPERATION = Operation("linear", linear, IMPLEMENTATIONS, CASES, devices={"measured": "cpu"})
