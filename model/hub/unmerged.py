"""Checkpoints that peft's adapters are still part of, as canary-qwen-2.5b is published: read as if they had been merged."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.hub.family import HubError
from model.hub.source import Source

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


class Merged:
    """The tensors of `source` under the names that they have without peft; an adapted matrix is base + scale * B A.

    :param config: the folder's config.json, whose `lora` says rank and alpha as NeMo writes them
    """

    def __init__(self, source: Source, config: Mapping[str, Any]):
        self._source, stored = source, source.shapes()
        self._adapters = {_plain(name.removesuffix(_A)) + ".weight": name.removesuffix(_A) for name in stored if name.endswith(_A)}
        self._names = {_plain(name): name for name in stored if not name.endswith((_A, _B))}
        settings = config.get("lora") or {}
        if "alpha" not in settings or settings.get("use_dora") or settings.get("use_rslora"):
            raise HubError(f"the checkpoint holds adapters and its config.json has lora={settings}; served are alpha and dim of plain LoRA")
        self._alpha = float(settings["alpha"])
        lost = [name for module in self._adapters.values() for name in (module + _B, f"{module}{_BASE}weight") if name not in stored]
        if lost:
            raise HubError(f"the checkpoint holds adapters without {', '.join(lost)}")

    def shapes(self) -> dict[str, list[int]]:
        """Shape of every tensor by name."""
        stored = self._source.shapes()
        return {plain: stored[name] for plain, name in self._names.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Data type of every tensor by name."""
        stored = self._source.dtypes()
        return {plain: stored[name] for plain, name in self._names.items() if name in stored}

    def read(self, name: str, where: Sequence[slice]) -> Tensor:
        """A box of a tensor, an adapted one in fp32; only the bytes of the box are touched, and the adapter's."""
        base = self._source.read(self._names[name], where)
        if name not in self._adapters:
            return base
        rows, columns = where
        a = self._source.read(self._adapters[name] + _A, (slice(None), columns)).float()
        b = self._source.read(self._adapters[name] + _B, (rows, slice(None))).float()
        return base.float() + (self._alpha / a.shape[0]) * (b @ a)


def _plain(name: str) -> str:
    return name.replace("base_model.model.", "", 1).replace(_BASE, ".", 1)


def merged(source: Source, folder: Path) -> Source:
    """`source` itself where it holds no adapters."""
    if not any(name.endswith(_A) for name in source.shapes()):
        return source
    return Merged(source, json.loads((folder / "config.json").read_text()))
