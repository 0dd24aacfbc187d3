"""Files: configurations, lazy slices of tensors in folders of safetensors and .nemo files, and safetensors written tensor by tensor."""

import json
import math
import struct
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import safe_open
from torch import Tensor

from model.hub.family import HubError
from model.hub.source import Source
from model.hub.unmerged import merged

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NEMO_PARTS = ("encoder", "preprocessor")
NEMO_CONFIG, NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
LLM_CONFIG = "llm_backbone/config.json"  # beside a SALM's config.json, which only names its language model
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """The tensors of a folder or of a .nemo file, which is unpacked for as long as it is open, or is already."""
    if is_unpacked(path):
        yield StateDict(path / NEMO_WEIGHTS)
    elif path.suffix == ".nemo":
        with tempfile.TemporaryDirectory() as folder:
            _unpack(path, Path(folder), NEMO_WEIGHTS)
            yield StateDict(Path(folder) / NEMO_WEIGHTS)
    else:
        with Folder(path) as found:
            yield merged(found, path)


def read_content(path: Path) -> dict[str, Any]:
    """config.json of a folder (with the language model's beside a SALM's), or model_config.yaml of a .nemo file, unpacked or not."""
    _check_there(path)
    try:
        if is_unpacked(path):
            content = _nemo_content(path / NEMO_CONFIG)
        elif path.suffix == ".nemo":
            with tempfile.TemporaryDirectory() as folder:
                _unpack(path, Path(folder), NEMO_CONFIG)
                content = _nemo_content(Path(folder) / NEMO_CONFIG)
        else:
            content = beside(path, json.loads((path / "config.json").read_text()))
    except (OSError, tarfile.TarError, json.JSONDecodeError, OmegaConfBaseException) as error:
        raise HubError(f"the configuration of {path} cannot be read ({error}); give the folder of a published checkpoint or a .nemo file") \
            from error
    return content


def _check_there(path: Path) -> None:
    """That a path may be a published checkpoint; what it lacks is said."""
    advice = "give the folder of a published checkpoint or a .nemo file"
    if not path.exists():
        raise HubError(f"{path} does not exist; {advice}")
    if not path.is_dir() and path.suffix != ".nemo":
        raise HubError(f"{path} is neither a folder nor a .nemo file; {advice}")
    if path.is_dir() and not is_unpacked(path) and not (path / "config.json").exists():
        if (path / "meta.json").exists() or (path / "checkpoints").is_dir():
            raise HubError(f"{path} is of a run and not published; python -m model.hub convert {path} OUT makes a folder that is")
        raise HubError(f"{path} holds neither config.json nor, like an unpacked .nemo file, {NEMO_CONFIG}; {advice}")


def is_unpacked(path: Path) -> bool:
    """Whether a folder is what a .nemo file unpacks to; where a config.json stands beside, that says what the folder is."""
    return (path / NEMO_CONFIG).exists() and not (path / "config.json").exists()


def _nemo_content(path: Path) -> dict[str, Any]:
    """The sections that we read; the others, about training and data, may refer to what only their owner's machine had."""
    whole: Any = OmegaConf.load(path)
    return {part: OmegaConf.to_container(whole[part], resolve=True) for part in NEMO_PARTS if part in whole}


def beside(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """`content`, and if it is a SALM's, the language model's configuration: from the folder, or from the one that pretrained_llm names."""
    if "perception" not in content:
        return content
    content = {key: value for key, value in content.items() if key != "lora"}  # adapters are read as merged
    places = (path / LLM_CONFIG, Path(str(content.get("pretrained_llm"))) / "config.json")
    found = next((place for place in places if place.exists()), None)
    return content if found is None else content | {"llm": json.loads(found.read_text())}


def _unpack(path: Path, folder: Path, name: str) -> None:
    """One member of a .nemo file, which is a tar archive, compressed or not."""
    with tarfile.open(path) as archive:
        member = next((m for m in archive if Path(m.name).name == name), None)
        if member is None:
            raise HubError(f"{path} holds no {name}; give a file that NeMo saved")
        member.name = name
        archive.extract(member, folder, filter="data")


class StateDict:
    """The tensors of a file that torch.save wrote, mapped into memory."""

    def __init__(self, path: Path):
        self._tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def shapes(self) -> dict[str, list[int]]:
        """Shape of every tensor by name."""
        return {name: list(t.shape) for name, t in self._tensors.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Data type of every tensor by name."""
        return {name: t.dtype for name, t in self._tensors.items()}

    def read(self, name: str, where: Sequence[slice]) -> Tensor:
        """A box of a tensor; only its bytes are touched."""
        return self._tensors[name][tuple(where)]


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
