"""Our front end and FastConformer against what NeMo recorded of them: features and encoder output of real speech, counts of frames."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model import fastconformer
from model.context import Context
from model.lengths import encoder_frames, mel_frames
from model.mel import log_mel
from model.params import Tree
from tests.goldens import perception
from tests.model.rows import audio_row, cut, cut_mel

COUNTS: dict[str, Callable[[Any], Any]] = {"mel_frames": mel_frames, "encoder_frames": encoder_frames}


def row(dtype: torch.dtype) -> tuple[Tensor, Context]:
    """Our features of the recorded clips in one flat row, and its Context."""
    audio_S, ctx = audio_row(perception.waves(), perception.ENCODER, unused=2, tail=3, training=False, dtype=dtype)
    return log_mel(audio_S, ctx), ctx


def features(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ours and NeMo's [frames, M], one clip after another; those of the last clip were not recorded."""
    recorded = perception.clips("mel", perception.facts()["mel_length"][:-1])
    return torch.cat(cut_mel(*row(dtype))[: len(recorded)]), torch.cat(recorded)


def encode(w: Tree, mel: Tensor, ctx: Context) -> Tensor:
    """The encoder's output for a row of features."""
    x_AD = fastconformer.subsample(w["subsampling"], mel, ctx)
    for layer in w["layers"]:
        x_AD, _ = fastconformer.forward(layer, x_AD, ctx)
    return x_AD


def encoded() -> tuple[Tensor, Tensor]:
    """Our fp32 encoder output from samples on and NeMo's [frames, D], one clip after another."""
    mel, ctx = row(torch.float32)
    out = encode(perception.weights(fastconformer.spec(perception.ENCODER), torch.float32), mel, ctx).detach()
    return torch.cat(cut(out, ctx)), perception.tensors()["encoded"]


def differing_lengths(name: str) -> set[int]:
    """Numbers of samples, from 0 to the longest recorded one, of which we count other frames than NeMo, in any of the numeric types."""
    facts, count = perception.facts(), COUNTS[name]
    numbers = np.arange(facts["longest"] + 1)
    expected = np.searchsorted(facts[f"{name}_rise_at"], numbers, side="right")
    found = count(numbers), count(torch.from_numpy(numbers)).numpy(), [count(n) for n in numbers.tolist()]
    return set(numbers[np.any([counts != expected for counts in found], axis=0)].tolist())
