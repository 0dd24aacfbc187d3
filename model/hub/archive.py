"""Writes a .nemo file: a whole recogniser's, with the tensors of its encoder replaced."""

import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.hub.files import NEMO_WEIGHTS


class Archive:
    """What the .nemo file `like` holds, with other values for the tensors that are written; it is held in memory."""

    def __init__(self, out: Path, like: Path):
        self._out, self._folder = out, tempfile.TemporaryDirectory()
        with tarfile.open(like) as archive:
            archive.extractall(self._folder.name, filter="data")
        self._weights = Path(self._folder.name) / NEMO_WEIGHTS
        self._state: dict[str, Any] = torch.load(self._weights, map_location="cpu", weights_only=True)

    def write(self, name: str, tensor: Tensor) -> None:
        """Another value of a tensor, which keeps its type."""
        self._state[name] = tensor.detach().to(self._state[name].dtype).cpu().clone()

    def close(self) -> None:
        """Write the file."""
        torch.save(self._state, self._weights)
        with tarfile.open(self._out, "w:") as archive:
            archive.add(self._folder.name, "./")
        self._folder.cleanup()
