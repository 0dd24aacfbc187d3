"""Folders of safetensors: headers of all files, lazy slices of tensors, and files written tensor by tensor."""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from model.hub.family import HubError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Folder:
    """The tensors of a folder; nothing is read but headers until a slice is asked for."""

    def __init__(self, path: Path):
        self.path, self._files = path, ExitStack()
        self._slices: dict[str, Any] = {}
        for name in _file_names(path):
            try:
                file = self._files.enter_context(safe_open(path / name, framework="pt"))
            except Exception as error:
                raise HubError(f"{path / name} cannot be read ({error}); copy the folder again") from error
            self._slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._slices.clear()
        self._files.close()

    def shapes(self) -> dict[str, list[int]]:
        """Shape of every tensor by name."""
        return {name: s.get_shape() for name, s in self._slices.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Data type of every tensor by name."""
        return {name: DTYPES[s.get_dtype()] for name, s in self._slices.items() if s.get_dtype() in DTYPES}

    def read(self, name: str, where: Sequence[slice]) -> Tensor:
        """A box of a tensor; only its bytes are touched."""
        part: Tensor = self._slices[name][tuple(where)]
        return part


def _file_names(path: Path) -> list[str]:
    if (path / INDEX).exists():
        return sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    if (path / SINGLE).exists():
        return [SINGLE]
    raise HubError(f"{path} holds neither {SINGLE} nor {INDEX}; give the folder of a published checkpoint")


class Writer:
    """Writes tensors, in the order of `plan`, into files of at most `limit_bytes`, with an index if there are several."""

    def __init__(self, path: Path, plan: Mapping[str, tuple[torch.dtype, Sequence[int]]], limit_bytes: int):
        self.path, self.plan = path, plan
        self.files = _parts(plan, limit_bytes)
        self._order = self._tensors()
        self._file: Any = None

    def _tensors(self) -> Iterator[str]:
        for number, names in enumerate(self.files, 1):
            self._open(self._name(number), names)
            yield from names
            self._file.close()

    def _name(self, number: int) -> str:
        return SINGLE if len(self.files) == 1 else f"model-{number:05d}-of-{len(self.files):05d}.safetensors"

    def _open(self, name: str, tensors: Sequence[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            dtype, shape = self.plan[tensor]
            start, end = end, end + _bytes(dtype, shape)
            header[tensor] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = (self.path / name).open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor of the plan."""
        expected = next(self._order)
        dtype, shape = self.plan[name]
        assert (name, tuple(tensor.shape)) == (expected, tuple(shape))
        self._file.write(tensor.detach().to(dtype).cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Finish the last file and write the index."""
        assert next(self._order, None) is None
        if len(self.files) > 1:
            total = sum(_bytes(*value) for value in self.plan.values())
            weight_map = {name: self._name(number) for number, names in enumerate(self.files, 1) for name in names}
            (self.path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def _parts(plan: Mapping[str, tuple[torch.dtype, Sequence[int]]], limit_bytes: int) -> list[list[str]]:
    """Names in order, a new list where the next tensor would exceed the limit."""
    files: list[list[str]] = [[]]
    room = limit_bytes
    for name, value in plan.items():
        size = _bytes(*value)
        if size > room and files[-1]:
            files.append([])
            room = limit_bytes
        files[-1].append(name)
        room -= size
    return files
