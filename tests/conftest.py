"""What every test starts from: one thread, poisoned memory, a fixed seed, and no state of the compiler from another file."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "inductor"))

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poison(*args: Any, **kwargs: Any) -> Tensor:
        out = allocate(*args, **kwargs)
        if out.is_floating_point():
            out.detach().fill_(float("nan"))
        return out

    return allocate_poison


@pytest.fixture(autouse=True, scope="session")
def poison_uninitialised_memory() -> Iterator[None]:
    """Fills what torch.empty and torch.empty_like return with NaN, so that reading memory before writing it shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """The limit on recompilations counts per function: without this, files that compile one function at many shapes add up."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The package, told before its models are imported that our folder `kernels` is not the package of that name."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    utils = pytest.importorskip("transformers.utils")
    import_utils.is_kernels_available = utils.is_kernels_available = lambda *args, **kwargs: False
    return pytest.importorskip("transformers")
