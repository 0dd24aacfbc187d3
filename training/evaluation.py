"""Validation loss and transcripts of the validation sets, over all ranks, each utterance once."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data.errors import DataError
from data.tokenizer import Tokenizer, prompt_ids
from model import speech_lm
from model.stages import own_stages
from parallel.collectives import gather_objects
from parallel.mesh import Mesh
from parallel.pipeline import Stage
from training.engine import Engine, Pass
from training.generation import Weights, generate
from training.pipeline import Transfers, hand_on, own_tokens
from training.scoring import Transcript
from training.state import State
from training.step import Batch, all_reduce_together, make_context, make_transfers, own_part, state_dtype, to_device


def validation_loss(cfg: Config, mesh: Mesh, engine: Engine, state: State, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Mean cross-entropy of all supervised tokens (sum over ranks / count over ranks), and their number. Every rank passes equally many."""
    leaves, own, zero = state.leaves(), own_stages(cfg, mesh.pp_rank), torch.zeros((), dtype=state_dtype(cfg), device=mesh.device)
    sums, transfers = {"loss": zero, "labels": zero}, make_transfers(cfg, mesh)
    for batch in batches:
        row = to_device(batch, mesh)
        row, context = own_part(cfg, row, mesh, training=False)
        loss = evaluated_loss(Pass(engine, leaves, context), row, cfg, own, transfers, own_tokens(mesh, row))
        if loss is not None:
            labels = (row["labels_T"] != -100).sum() / (mesh.sizes.cp * mesh.sizes.tp)  # the others that share the row count them too
            sums = {"loss": sums["loss"] + loss, "labels": sums["labels"] + labels}
    transfers.finish()
    totals = all_reduce_together(sums)
    return {"loss": (totals["loss"] / totals["labels"].clamp(min=1)).item(), "labels": totals["labels"].item()}


def evaluated_loss(run: Pass, row: Batch, cfg: Config, own: Sequence[Stage], transfers: Transfers, tokens: int) -> Tensor | None:
    """The summed cross-entropy of a row, without a gradient, on the rank that has the end of the pipeline; None on the others.

    :param own: this rank's stages
    :param tokens: that this rank has of the row between the layers
    """
    found: dict[str, Tensor] = {}

    def compute(stage: Stage, x_TD: Tensor | None) -> Tensor:
        y_TD, losses, _ = speech_lm.part(run, stage, x_TD, row, run.context, cfg)
        found.update(losses)
        return y_TD

    hand_on(transfers, own, tokens, compute)
    return found["lm"].detach() if "lm" in found else None


def transcribe(weights: Weights, batches: Iterable[dict[str, Any]], tokenizer: Tokenizer) -> list[Transcript]:
    """Answers to prompt-only rows (see data.loader.decoding_batches), of all ranks, on every rank, ordered by utterance id; the pieces of
    an utterance joined."""
    cfg, mesh = weights.cfg, weights.mesh
    stop_ids, text_tokens = stops(cfg, tokenizer), len(prompt_ids(cfg.data, tokenizer)) - 1
    mine: list[tuple[str, int, Transcript]] = []
    for batch in batches:
        row = to_device(batch, mesh)
        context = make_context(cfg, row, mesh, training=False, split=False)
        names = [f"{name}/{piece}" for name, piece in zip(batch["ids"], batch["pieces"], strict=True)]
        longest = max(context.utterance_frames, cfg.data.queries) + text_tokens
        answers = generate(weights, row, context, longest=longest, stop_ids=stop_ids, names=names)
        for u, (name, piece, answer) in enumerate(zip(batch["ids"], batch["pieces"], answers, strict=True)):
            audio_sec = int(batch["audio_samples_U"][u]) / cfg.data.sample_rate
            mine.append((name, piece, Transcript(name, batch["texts"][u], tokenizer.decode(answer).strip(), audio_sec)))
    return joined([piece for part in gather_objects(mine, mesh.dp_group) for piece in part])


def joined(pieces: Iterable[tuple[str, int, Transcript]]) -> list[Transcript]:
    """One transcript an utterance, ordered by id: the hypotheses of its pieces in order, their durations together."""
    found: dict[str, Transcript] = {}
    for name, _, t in sorted(pieces, key=lambda piece: piece[:2]):
        before = found.get(name)
        heard = [text for text in (before.hypothesis if before else "", t.hypothesis) if text]
        found[name] = Transcript(name, t.reference, " ".join(heard), t.audio_sec + (before.audio_sec if before else 0.0))
    return list(found.values())


def stops(cfg: Config, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer: the tokenizer's and generation.stop_tokens."""
    more = {token: tokenizer.backend.token_to_id(token) for token in cfg.generation.stop_tokens}
    unknown = [token for token, index in more.items() if index is None]
    if unknown:
        raise DataError(f"generation.stop_tokens holds {unknown[0]!r}, which {cfg.data.tokenizer} does not have; name one of its tokens")
    return [*tokenizer.stop_ids, *(index for index in more.values() if index is not None)]


def mel_picture(cfg: Config, mesh: Mesh, batch: Batch) -> Tensor:
    """The log-mel features [M, frames] of the first utterance of a row, as the encoder sees them."""
    context = make_context(cfg, batch, mesh, training=False)
    frames = 8 * int(batch["audio_lengths_U"][0])
    return speech_lm.FEATURES[context.encoder.kind](batch["audio_S"], context)[:frames].t()
