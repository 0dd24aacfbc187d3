"""One training step: (state, micro-batches) -> (state, metrics)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Config, EncoderConfig
from model import lora, params, speech_lm
from model.context import Context
from parallel import sharding
from parallel.collectives import sum_over_ranks
from parallel.mesh import Mesh
from training import optimizer
from training.engine import Engine, Pass
from training.state import State

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Batch = dict[str, Tensor]


class Gradients(NamedTuple):
    """One step's gradients of this rank's shards, and the sums over all ranks and micro-batches."""

    grads: dict[str, Tensor]
    sums: dict[str, Tensor]  # losses and what the layers count
    counts: dict[str, Tensor]  # supervised tokens


def make_context(cfg: Config, batch: Batch, mesh: Mesh, training: bool) -> Context:
    """The layers' view of a packed row."""
    lengths = {name: batch[name] for name in ("cu_seqlens_U1", "segments_T", "positions_T", "audio_starts_U", "audio_samples_U",
                                              "audio_lengths_U", "audio_segments_A", "audio_positions_A")}
    return Context(cfg.model.encoder or EncoderConfig(), cfg.model.decoder, **lengths, utterance_frames=_utterance_frames(cfg, batch),
                   dtype=DTYPES[cfg.precision], ep_group=mesh.ep_group, draw=batch.get("draw", batch["positions_T"].new_zeros(())),
                   training=training)


def _utterance_frames(cfg: Config, batch: Batch) -> int:
    """The bound of the row size that this batch was packed into."""
    sizes = (len(batch["tokens_T"]), len(batch["audio_segments_A"]))
    return next(r.utterance_frames for r in cfg.data.rows if (r.tokens, r.audio_frames) == sizes)


def make_engine(cfg: Config, mesh: Mesh) -> Engine:
    """The units of the configured model."""
    bind = {"bind": lora.binder(cfg.model.lora)} if cfg.model.lora.rank else {}
    return Engine(speech_lm.spec(cfg), speech_lm.units(cfg), mesh, DTYPES[cfg.precision], cfg.parallel.reshard_after_forward, cfg.compile,
                  **bind)


def make_gradients(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], Gradients]:
    """The function that turns a state and a step's micro-batches into the gradient of the global mean loss."""

    def forward(leaves: dict[str, Tensor], batch: Batch, counts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return row_loss(cfg, mesh, engine, leaves, batch, counts)

    if cfg.compile.enabled and cfg.compile.scope == "step":
        forward = torch.compile(forward, fullgraph=True, dynamic=False)

    def gradients(state: State, batches: Sequence[Batch]) -> Gradients:
        leaves = state.leaves()
        weights = {name: leaves[name] for name in state.trained}
        counts = label_counts(batches, mesh)
        grads: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            draw = (state.step * len(batches) + number) * mesh.dp + mesh.rank
            loss, stats = forward(leaves, batch | {"draw": torch.tensor(draw, device=mesh.device)}, counts)
            for name, grad in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
                grads[name] = grads[name] + grad if name in grads else grad
            stats = {name: value.detach() for name, value in (stats | {"loss": loss}).items()}
            sums = {name: sums[name] + value for name, value in stats.items()} if sums else stats
        return Gradients(grads, all_reduce_together(sums), counts)

    return gradients


def make_step(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], tuple[State, dict[str, Tensor]]]:
    """The training step. The old state's tensors are updated in place: use only the returned state afterwards."""
    decayed = {name for name, p in params.named_leaves(speech_lm.spec(cfg)) if p.decay}
    gradients = make_gradients(cfg, mesh, engine)

    def step(state: State, batches: Sequence[Batch]) -> tuple[State, dict[str, Tensor]]:
        grads, sums, counts = gradients(state, batches)
        norm = optimizer.global_norm(list(grads.values()))
        optimizer.clip(list(grads.values()), norm, cfg.optimizer.clip_norm)
        lr = optimizer.learning_rate(state.step, cfg.optimizer, cfg.train.steps)
        with torch.no_grad():
            optimizer.update(sharding.local(state.trained), grads, sharding.local(state.first), sharding.local(state.second), state.step,
                             lr, cfg.optimizer, decayed)
        buffers = speech_lm.update(state.buffers, sums, cfg.model)
        return replace(state, step=state.step + 1, buffers=buffers), {"grad_norm": norm, "labels": counts["lm"], **sums}

    return step


def row_loss(cfg: Config, mesh: Mesh, engine: Engine, leaves: dict[str, Tensor], batch: Batch,
             counts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """This row's share of the global loss, and sums for metrics and buffers.

    :param counts: global label counts over all ranks and micro-batches; the only place where a loss is divided by a count.
    """
    run = Pass(engine, leaves, make_context(cfg, batch, mesh, training=True))
    losses, stats = speech_lm.losses(run, batch, run.context, cfg)
    shares = {name: value / counts[name].clamp(min=1) for name, value in losses.items()}
    total = shares["lm"] + cfg.train.ctc_weight * shares["ctc"] if "ctc" in shares else shares["lm"]
    return total, stats | {f"loss_{name}": share for name, share in shares.items()}


def to_device(batch: dict[str, Any], mesh: Mesh) -> Batch:
    """The tensors of a batch, on this rank's device."""
    return {name: value.to(mesh.device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}


def label_counts(batches: Sequence[Batch], mesh: Mesh) -> dict[str, Tensor]:
    """Supervised tokens ("lm") and transcript tokens ("ctc") over all micro-batches and ranks."""
    lm = sum(((b["labels_T"] != -100).sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    ctc = sum((b["ctc_lengths_U"].sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    both = torch.stack([lm, ctc])
    sum_over_ranks(both)
    return {"lm": both[0], "ctc": both[1]}


def all_reduce_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks, in one collective, as fp32."""
    flat = torch.cat([t.float().reshape(-1) for t in tensors.values()])
    parts = sum_over_ranks(flat).split([t.numel() for t in tensors.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
