"""Validation loss and greedy transcripts of the validation sets, over all ranks, each utterance once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jiwer
import torch
from torch import Tensor

from configs.schema import Config
from data.tokenizer import Tokenizer
from model import mel, speech_lm
from parallel.collectives import gather_objects
from parallel.mesh import Mesh
from training.decode import greedy
from training.engine import Engine, Pass
from training.state import State
from training.step import Batch, all_reduce_together, make_context, to_device


@dataclass(frozen=True)
class Transcript:
    """What was said and what was heard."""

    id: str
    reference: str
    hypothesis: str


def validation_loss(cfg: Config, mesh: Mesh, engine: Engine, state: State, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Mean cross-entropy of all supervised tokens (sum over ranks / count over ranks), and their number. Every rank passes equally many."""
    leaves = state.leaves()
    sums = {"loss": torch.zeros((), device=mesh.device), "labels": torch.zeros((), device=mesh.device)}
    for batch in batches:
        row = to_device(batch, mesh)
        run = Pass(engine, leaves, make_context(cfg, row, mesh, training=False))
        losses, _ = speech_lm.losses(run, row, run.context, cfg)
        labels = (row["labels_T"] != -100).sum() / run.context.alike  # the other ranks that share the row count them too
        sums = {"loss": sums["loss"] + losses["lm"].detach(), "labels": sums["labels"] + labels}
    totals = all_reduce_together(sums)
    return {"loss": (totals["loss"] / totals["labels"].clamp(min=1)).item(), "labels": totals["labels"].item()}


def transcribe(cfg: Config, mesh: Mesh, engine: Engine, state: State, batches: Iterable[dict[str, Any]],
               tokenizer: Tokenizer) -> list[Transcript]:
    """Greedy transcripts of prompt-only rows (see data.loader.decoding_batches), of all ranks, on every rank, ordered by utterance id."""
    leaves, mine = state.leaves(), []
    for batch in batches:
        answers = greedy(cfg, mesh, engine, leaves, to_device(batch, mesh), batch["answer_starts"], batch["answer_room"], tokenizer.eos_id)
        mine += [Transcript(*fields) for fields in zip(batch["ids"], batch["texts"], map(tokenizer.decode, answers), strict=True)]
    return sorted((t for part in gather_objects(mine, mesh.dp_group) for t in part), key=lambda t: t.id)


def word_error_rate(transcripts: list[Transcript]) -> dict[str, float]:
    """WER and its parts by jiwer. An utterance without a reference word counts only what was inserted there; none at all gives 0 words."""
    spoken = [t for t in transcripts if t.reference.split()]
    silent = sum(len(t.hypothesis.split()) for t in transcripts if not t.reference.split())
    if not spoken:
        return {"wer": float(silent > 0), "words": 0, "substitutions": 0, "deletions": 0, "insertions": silent}
    counted = jiwer.process_words([t.reference for t in spoken], [t.hypothesis for t in spoken])
    words = counted.hits + counted.substitutions + counted.deletions
    errors = counted.substitutions + counted.deletions + counted.insertions + silent
    return {"wer": errors / words, "words": words, "substitutions": counted.substitutions, "deletions": counted.deletions,
            "insertions": counted.insertions + silent}


def mel_picture(cfg: Config, mesh: Mesh, batch: Batch) -> Tensor:
    """Normalised log-mel [M, frames] of the first utterance of a row."""
    context = make_context(cfg, batch, mesh, training=False)
    frames = 8 * int(batch["audio_lengths_U"][0])
    return mel.log_mel(batch["audio_S"], context)[:frames].t()
