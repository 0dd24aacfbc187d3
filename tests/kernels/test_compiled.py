"""The default configuration of every kernel, compiled without a GPU for two architectures: it builds, fits, does not spill, and multiplies
with the tensor cores' own instructions where it multiplies. Products of fp32 are left to `python -m perf compile`: they take minutes."""

import pytest
import torch

pytest.importorskip("triton")

from perf.cases import Operation, operations
from perf.static import problems, variants

OPERATIONS = [operation for operation in operations() if "triton" in operation.implementations]
ARCHITECTURES = 90, 120  # the wgmma pipeline, and the smallest shared memory
SLOW = {"experts": 120, "ssd": 90}  # half a minute an architecture: here one of them, `python -m perf compile` takes all


@pytest.mark.parametrize(("operation", "arch"), [(o, arch) for o in OPERATIONS for arch in ARCHITECTURES if SLOW.get(o.name, arch) == arch],
                         ids=lambda value: getattr(value, "name", value))
def test_default_configurations(operation: Operation, arch: int) -> None:
    dtypes = (torch.bfloat16,) if operation.products else (torch.bfloat16, torch.float32)
    found = list(variants(operation, arch, candidates=False, dtypes=dtypes))
    assert operation.products <= {variant.kernel.name for variant in found}
    assert [(variant.kernel.name, variant.case, problem) for variant in found for problem in problems(variant, operation.products)] == []
