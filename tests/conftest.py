"""What every test starts from: one thread, poisoned memory, a fixed seed, and no state of the compiler from another file."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("REEDLING_FP32_PRODUCTS", "mkl")  # else each process measures, and rounding follows the clock; both have their tests
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "inductor"))

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.inductor import name_cached_graphs

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]  # run by tests/kernels/interpreted.py


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poison(*args: Any, **kwargs: Any) -> Tensor:
        out = allocate(*args, **kwargs)
        if out.is_floating_point() and not torch.compiler.is_compiling():
            out.detach().fill_(float("nan"))
        return out

    return allocate_poison


def _traceable_new_empty(new_empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The compiler refuses to call a method of Tensor through a variable."""

    def allocate(x: Tensor, *size: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.empty(*size, **{"dtype": x.dtype, "device": x.device, **kwargs})
        return new_empty(x, *size, **kwargs)

    return allocate


@pytest.fixture(autouse=True, scope="session")
def poison_uninitialised_memory() -> Iterator[None]:
    """Fills with NaN what torch.empty and its relatives return, so that reading memory before writing it shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        patch.setattr(Tensor, "new_empty", _poisoned(_traceable_new_empty(Tensor.new_empty)))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_processes() -> None:
    """For what brings its own, of which there can be one set at a time; other tests leave theirs."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler() -> Iterator[None]:
    """Graphs on disk from other versions of kernels/ are not met, nor the limit on recompilations, which counts per function."""
    name_cached_graphs()
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
