"""What a launch depends on besides its arguments: the architecture, its number of multiprocessors, and tile sizes, which are data.

Tile sizes stand in the tuned.json beside an operation, by kernel, shape class and architecture:

    {"_forward_kernel": {"any": {"default": {"BLOCK_M": 128, "num_warps": 8, "num_stages": 3}, "sm_120": {...}}}}

Nothing is tuned while a model trains; `python -m perf tune` times the candidates of perf/cases and rewrites the files.
"""

import functools
import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = (80, 90, 100, 120)
INTERPRETED_PROCESSORS = 3  # few enough that each takes several tiles of a test

_assumed: dict[str, int] = {}  # "architecture", while kernels are compiled for a device that is not there
_forced: dict[str, Mapping[str, int]] = {}  # tile sizes by kernel, while candidates are tried
_listeners: list[set[tuple[str, str]]] = []  # kernels and shape classes that were asked for


def architecture(device: torch.device) -> int:
    """The member of ARCHITECTURES whose limits the device shares; 90 in the interpreter."""
    if "architecture" in _assumed or device.type != "cuda":
        return _assumed.get("architecture", 90)
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) in ((8, 6), (8, 9)):
        return 120  # as little shared memory
    return min(ARCHITECTURES, key=lambda known: abs(known - 10 * major))


def processors(device: torch.device) -> int:
    """Multiprocessors of the device, for grids that stay resident."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def serves(t: Tensor, implementations: Container[str]) -> bool:
    """Whether "auto" takes the Triton version of an operation that has none in fp64."""
    return t.device.type == "cuda" and t.dtype != torch.float64 and "triton" in implementations


def whole_rows(t: Tensor) -> Tensor:
    """Kernels take any strides but that of the last dimension: views of a wide projection are read where they are."""
    return t if t.stride(-1) == 1 else t.contiguous()


def tiles(operation: str, kernel: str, device: torch.device, shape: str = "any") -> dict[str, Any]:
    """Keyword arguments of a launch: the constants that set its tiles, num_warps and num_stages."""
    for asked in _listeners:
        asked.add((kernel, shape))
    if kernel in _forced:
        return dict(_forced[kernel])
    choices = table(operation)[kernel][shape]
    return dict(choices.get(f"sm_{architecture(device)}", choices["default"]))


@functools.cache
def table(operation: str) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """The operation's tuned.json."""
    return json.loads(path(operation).read_text())


def path(operation: str) -> Path:
    return Path(__file__).parent / operation / "tuned.json"


@contextmanager
def assumed(arch: int) -> Iterator[None]:
    """Launches are for this architecture, whatever device holds the tensors."""
    _assumed["architecture"] = arch
    try:
        yield
    finally:
        _assumed.clear()


@contextmanager
def forced(kernel: str, choice: Mapping[str, int]) -> Iterator[None]:
    """Launches of a kernel take these tiles."""
    _forced[kernel] = choice
    try:
        yield
    finally:
        del _forced[kernel]


@contextmanager
def asked() -> Iterator[set[tuple[str, str]]]:
    """Collects the kernels and shape classes whose tiles are asked for."""
    kernels: set[tuple[str, str]] = set()
    _listeners.append(kernels)
    try:
        yield kernels
    finally:
        _listeners.remove(kernels)
