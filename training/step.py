"""One training step: (state, micro-batches) -> (state, metrics)."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Config, EncoderConfig
from model import lora, params, speech_lm
from model.context import Context
from parallel import audio, sharding
from parallel.collectives import every_rank, sum_over_ranks
from parallel.gather import Reshard, Shared
from parallel.mesh import Mesh
from parallel.names import zero_stage
from training import optimizer
from training.engine import Engine, Pass
from training.state import State

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}  # of the computation
DEFER_SHARE = 0.25  # of a rank's memory that whole gradients may take for parallel.defer_grad_sync=auto to keep them
Batch = dict[str, Tensor]


class Gradients(NamedTuple):
    """One step's gradients of this rank's shards, and the sums over all ranks and micro-batches."""

    grads: dict[str, Tensor]
    sums: dict[str, Tensor]  # losses and what the layers count
    counts: dict[str, Tensor]  # supervised tokens


def make_context(cfg: Config, batch: Batch, mesh: Mesh, training: bool, split: bool = True) -> Context:
    """The layers' view of a packed row.

    :param split: over the ranks of cp and tp; else each of them computes the whole row.
    """
    lengths = {name: batch[name] for name in ("cu_seqlens_U1", "segments_T", "positions_T", "audio_starts_U", "audio_samples_U",
                                              "audio_lengths_U", "audio_segments_A", "audio_positions_A")}
    return Context(cfg.model.encoder or EncoderConfig(), cfg.model.decoder, **lengths, utterance_frames=_utterance_frames(cfg, batch),
                   dtype=DTYPES[cfg.precision], ep_group=mesh.ep_group, ep_dispatch=cfg.parallel.ep_dispatch,
                   cp_group=mesh.cp_group if split else None, tp_group=mesh.tp_group if split else None,
                   split_group=mesh.split_group if split else None, cp_split=cfg.parallel.cp_split,
                   draw=batch.get("draw", batch["positions_T"].new_zeros(())), training=training)


def own_part(cfg: Config, batch: Batch, mesh: Mesh, training: bool) -> tuple[Batch, Context]:
    """A row with the audio that this rank encodes of it, and the layers' view of that."""
    context = make_context(cfg, batch, mesh, training)
    if context.split_group is None or cfg.model.encoder is None:
        return batch, context
    batch = audio.own_utterances(batch, context, context.split_group.size(), context.split_group.rank())
    fields: dict[str, Any] = {name: batch[name] for name in audio.FIELDS}
    return batch, replace(context, **fields)


def _utterance_frames(cfg: Config, batch: Batch) -> int:
    """The bound of the row size that this batch was packed into."""
    sizes = (len(batch["tokens_T"]), len(batch["audio_segments_A"]))
    return next(r.utterance_frames for r in cfg.data.rows if (r.tokens, r.audio_frames) == sizes)


def make_engine(cfg: Config, mesh: Mesh) -> Engine:
    """The units of the configured model."""
    keeps = zero_stage(cfg.parallel.zero_stage) < 3
    reshard = Reshard(cfg.parallel.reshard_after_forward and not keeps, cfg.parallel.reshard_experts_after_forward and not keeps)
    bind = {"bind": lora.binder(cfg.model.lora)} if cfg.model.lora.rank else {}
    recompute = {"encoder.": cfg.train.activation_checkpointing_encoder, "decoder.layers.": cfg.train.activation_checkpointing}
    sums = torch.bfloat16 if cfg.parallel.reduce_dtype == "bf16" else None
    return Engine(speech_lm.spec(cfg), speech_lm.units(cfg), mesh, DTYPES[cfg.precision], reshard, cfg.compile, recompute=recompute,
                  sums=sums, **bind)


def state_dtype(cfg: Config) -> torch.dtype:
    """Dtype of parameters, moments and reductions."""
    return torch.promote_types(DTYPES[cfg.precision], torch.float32)


def make_gradients(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], Gradients]:
    """The function that turns a state and a step's micro-batches into the gradient of the global mean loss."""
    stage = zero_stage(cfg.parallel.zero_stage)
    holds, defers = stage in (1, 2), defers_gradients(cfg, mesh)

    def forward(leaves: dict[str, Tensor], batch: Batch, counts: dict[str, Tensor],
                shared: Shared | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return row_loss(cfg, mesh, engine, leaves, batch, counts, shared)

    one_graph = cfg.compile.enabled and cfg.compile.scope == "step"
    if one_graph:
        forward = torch.compile(forward, fullgraph=True, dynamic=False)

    def gradients(state: State, batches: Sequence[Batch]) -> Gradients:
        leaves = state.leaves()
        weights = {name: leaves[name] for name in state.trained}
        counts = label_counts(batches, mesh)
        grads: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        shared = Shared(holds, defers)
        for number, batch in enumerate(batches):
            shared.last = number == len(batches) - 1
            draw = (state.step * len(batches) + number) * mesh.dp + mesh.dp_rank
            row = batch | {"draw": torch.full((), draw, dtype=torch.int64, device=mesh.device)}
            loss, stats = forward(leaves, row, counts) if one_graph else forward(leaves, row, counts, shared)
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=not shared.last)  # None: it waits for the last row
            for name, grad in zip(weights, found, strict=True):
                if grad is not None:
                    grads[name] = grads[name] + grad if name in grads else grad
            stats = {name: value.detach() for name, value in (stats | {"loss": loss}).items()}
            sums = {name: sums[name] + value for name, value in stats.items()} if sums else stats
        return Gradients({name: grads[name] for name in weights}, all_reduce_together(sums), counts)

    return gradients


def defers_gradients(cfg: Config, mesh: Mesh) -> bool:
    """Whether whole gradients are kept until the last micro-batch of a step and reduced once, the same on every rank.

    parallel.defer_grad_sync=auto keeps them where they are whole anyway (zero stages 0 and 1), else where they fit beside the state.
    """
    choice, stage = cfg.parallel.defer_grad_sync, zero_stage(cfg.parallel.zero_stage)
    if cfg.train.accumulate == 1 or mesh.world == 1 or (cfg.compile.enabled and cfg.compile.scope == "step"):
        return False
    if choice != "auto" or stage <= 1:
        return choice if isinstance(choice, bool) else True
    leaves = [p for _, p in params.named_leaves(speech_lm.spec(cfg)) if p.kind == "param" and p.trained]
    whole_bytes = sum(state_dtype(cfg).itemsize * math.prod(sharding.local_shape(p, sharding.place(p, mesh))) for p in leaves)
    return every_rank(whole_bytes <= DEFER_SHARE * memory_bytes(mesh.device), mesh.device)


def memory_bytes(device: torch.device) -> int:
    """Memory of the GPU; of a CPU this process's part of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def make_step(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], tuple[State, dict[str, Tensor]]]:
    """The training step. The old state's tensors are updated in place: use only the returned state afterwards."""
    spec = dict(params.named_leaves(speech_lm.spec(cfg)))
    decayed = {name for name, p in spec.items() if p.decay}
    copies = {name: sharding.place(p, mesh).copies for name, p in spec.items()}
    gradients = make_gradients(cfg, mesh, engine)

    def step(state: State, batches: Sequence[Batch]) -> tuple[State, dict[str, Tensor]]:
        grads, sums, counts = gradients(state, batches)
        norm = optimizer.global_norm(grads, copies)
        optimizer.clip(list(grads.values()), norm, cfg.optimizer.clip_norm)
        lr = optimizer.learning_rate(state.step, cfg.optimizer, cfg.train.steps)
        with torch.no_grad():
            optimizer.update(sharding.local(state.trained), grads, sharding.local(state.first), sharding.local(state.second), state.step,
                             lr, cfg.optimizer, decayed)
        buffers = speech_lm.update(state.buffers, sums, cfg.model)
        return replace(state, step=state.step + 1, buffers=buffers), {"grad_norm": norm, "labels": counts["lm"], **sums}

    return step


def row_loss(cfg: Config, mesh: Mesh, engine: Engine, leaves: dict[str, Tensor], batch: Batch,
             counts: dict[str, Tensor], shared: Shared | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """This row's share of the global loss, and sums for metrics and buffers.

    :param counts: global label counts over all ranks and micro-batches; the only place where a loss is divided by a count.
    :param shared: what this row has in common with the step's other micro-batches.
    """
    batch, context = own_part(cfg, batch, mesh, training=True)
    losses, stats = speech_lm.losses(Pass(engine, leaves, context, shared), batch, context, cfg)
    shares = {name: value / counts[name].clamp(min=1) for name, value in losses.items()}
    total = shares["lm"] + cfg.train.ctc_weight * shares["ctc"] if "ctc" in shares else shares["lm"]
    return total, stats | {f"loss_{name}": share for name, share in shares.items()}


def to_device(batch: dict[str, Any], mesh: Mesh) -> Batch:
    """The tensors of a batch, on this rank's device."""
    return {name: value.to(mesh.device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}


def label_counts(batches: Sequence[Batch], mesh: Mesh) -> dict[str, Tensor]:
    """Supervised tokens ("lm") and transcript tokens ("ctc") over all micro-batches and all ranks that have rows of their own."""
    lm = sum(((b["labels_T"] != -100).sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    ctc = sum((b["ctc_lengths_U"].sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    both = torch.stack([lm, ctc])
    sum_over_ranks(both, mesh.dp_group)
    return {"lm": both[0], "ctc": both[1]}


def all_reduce_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks, in one collective, as fp32 or wider."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
    flat = torch.cat([t.to(wide).reshape(-1) for t in tensors.values()])
    parts = sum_over_ranks(flat).split([t.numel() for t in tensors.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
