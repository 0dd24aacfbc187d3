"""The recorded values of NeMo's front end and encoder; make_perception.py says how they came about."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.schema import EncoderConfig
from model.params import Tree, map_named

FOLDER = Path(__file__).parent
ENCODER = EncoderConfig(mel_bins=128, d_model=64, n_layers=2, n_heads=4, subsampling_channels=32)


@functools.cache
def tensors() -> dict[str, Tensor]:
    return load_file(FOLDER / "perception.safetensors")


@functools.cache
def facts() -> dict[str, Any]:
    return json.loads((FOLDER / "perception.json").read_text())


def waves() -> list[Tensor]:
    """Samples of the four clips."""
    return list((tensors()["audio"].float() / 32768).split(tensors()["audio_length"].tolist()))


def clips(name: str, lengths: list[int]) -> list[Tensor]:
    """A tensor of frames, one clip after another, in pieces."""
    return list(tensors()[name].split(lengths))


def theirs(path: str) -> str:
    """NeMo's name of a parameter of ours."""
    return path.replace("subsampling.", "pre_encode.")


def weights(spec: Tree, dtype: torch.dtype) -> Tree:
    """The recorded weights in our tree; parameters require gradients."""
    def load(path: str, p: Any) -> Tensor:
        tensor = tensors()[f"weights.{theirs(path)}"].to(dtype, copy=True)
        assert tensor.shape == p.shape, path
        return tensor.requires_grad_(p.kind == "param")
    return map_named(load, spec)
