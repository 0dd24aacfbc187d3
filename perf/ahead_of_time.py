"""Compiles the kernels that an ordinary call would launch, for any architecture, on a machine that may have no GPU.

The call runs on CPU tensors; its launches compile and do nothing, so its results mean nothing. Needs a process without TRITON_INTERPRET.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # that one block may have
MULTIPROCESSOR = {80: (167_936, 64), 90: (233_472, 64), 100: (233_472, 64), 120: (102_400, 48)}  # shared bytes and warps it holds
REGISTERS = 65_536  # of a multiprocessor
INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDL", "STL")


@dataclass
class Kernel:
    """One compiled variant; everything below `constants` stays empty if it did not compile."""

    name: str
    arch: int
    types: tuple[str, ...]  # of the arguments that are no constants
    constants: dict[str, Any]
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES[self.arch]

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's warps that can be resident."""
        if self.error or not self.fits:
            return 0.0
        shared, warps = MULTIPROCESSOR[self.arch]
        blocks = min(shared // (self.shared_bytes + 1024), REGISTERS // (32 * self.warps * max(self.registers, 1)), warps // self.warps)
        return blocks * self.warps / warps


class _Driver:
    """Answers Triton's questions about a GPU that is not there."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def launches_compiled(arch: int, only: str = "") -> Iterator[list[Kernel]]:
    """Within, launches compile for sm_<arch> and end there, those of other kernels than `only` at once; one entry for each variant."""
    found: dict[tuple[Any, ...], Kernel] = {}
    kernels: list[Kernel] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if only not in ("", self.fn.__name__):
            return
        try:
            compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            constants = {name: value for name, value in kwargs.items() if isinstance(value, (int, str))}
            kernels.append(Kernel(self.fn.__name__, arch, (), constants, error=f"{type(error).__name__}: {error}"))
            return
        if compiled.hash not in found:
            found[compiled.hash] = _examined(self, compiled, arch)
            kernels.append(found[compiled.hash])

    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        with launch.assumed(arch), mock.patch.object(JITFunction, "run", run):
            yield kernels
    finally:
        driver._active = before


def compiled_kernels(call: Callable[[], Any], arch: int, only: str = "") -> list[Kernel]:
    """The kernels that `call` would launch on sm_<arch>, or the one of that name."""
    with launches_compiled(arch, only) as kernels:
        call()
    return kernels


def _examined(function: JITFunction, compiled: Any, arch: int) -> Kernel:
    signature = compiled.src.signature
    types = tuple(str(kind) for kind in signature.values() if kind != "constexpr")
    constants = {function.arg_names[path[0]]: value for path, value in compiled.src.constants.items() if len(path) == 1}
    registers, spills, warnings = _resources(compiled.asm["ptx"], arch)
    metadata = compiled.metadata
    return Kernel(function.fn.__name__, arch, types, constants, metadata.num_warps, metadata.num_stages, registers, spills, metadata.shared,
                  _instructions(compiled.asm["cubin"]), warnings)


def _resources(ptx: str, arch: int) -> tuple[int, int, list[str]]:
    """Registers, spilled bytes and warnings about serialised products, as the assembler reports them."""
    newer = arch >= 100 and (TOOLS / "ptxas-blackwell").exists()
    target = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
    log = _tool("ptxas-blackwell" if newer else "ptxas", ptx.encode(), ".ptx", ["-v", target, "-o", os.devnull]).stderr
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    if not used or not spilled:
        raise RuntimeError(f"the assembler failed: {log}")
    return int(used[1]), int(spilled[1]), [line for line in log.splitlines() if "wgmma" in line.lower()]


def _instructions(cubin: bytes) -> dict[str, int]:
    """How often each of INSTRUCTIONS occurs in the machine code."""
    words = re.findall(r"\b[A-Z][A-Z0-9]+\b", _tool("nvdisasm", cubin, ".cubin", ["-c"]).stdout)
    return {name: words.count(name) for name in INSTRUCTIONS if name in words}


def _tool(name: str, content: bytes, suffix: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        return subprocess.run([str(TOOLS / name), *arguments, file.name], capture_output=True, text=True, check=False)
