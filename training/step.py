"""One training step: (state, micro-batches) -> (state, metrics)."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import Config, EncoderConfig
from model import lora, params, speech_lm
from model.context import Context
from model.stages import actions_of_step, halved, own_spec, own_stages, places, shared_leaves, stages, trained_paths, turns
from parallel import audio, sharding
from parallel.collectives import all_reduce, every_rank, gather_objects, sum_over_ranks
from parallel.gather import Reshard, Shared
from parallel.mesh import Mesh
from parallel.names import offloaded, zero_stage
from parallel.offload import to_host
from parallel.pipeline import Stage
from training import optimizer
from training.cuda_graph import Recorded
from training.engine import Engine, Pass
from training.pipeline import Part, StepWork, Transfers, carry_out, own_tokens, part_gradients
from training.state import State, init_state

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}  # of the computation
DEFER_SHARE = 0.25  # of a rank's memory that whole gradients may take for parallel.defer_grad_sync=auto to keep them
Batch = dict[str, Tensor]
RowLoss = tuple[Tensor | None, Tensor | None, dict[str, Tensor]]  # see row_loss


class Gradients(NamedTuple):
    """One step's gradients of this rank's shards, and the sums over all ranks and micro-batches."""

    grads: dict[str, Tensor]
    sums: dict[str, Tensor]  # losses and what the layers count
    counts: dict[str, Tensor]  # what the losses are divided by


def make_context(cfg: Config, batch: Batch, mesh: Mesh, training: bool, split: bool = True) -> Context:
    """The layers' view of a packed row.

    :param split: over the ranks of cp and tp; else each of them computes the whole row.
    """
    lengths = {name: batch[name] for name in ("cu_seqlens_U1", "segments_T", "positions_T", "audio_starts_U", "audio_samples_U",
                                              "audio_lengths_U", "audio_segments_A", "audio_positions_A")}
    return Context(cfg.model.encoder or EncoderConfig(), cfg.model.decoder, **lengths, utterance_frames=_utterance_frames(cfg, batch),
                   dtype=DTYPES[cfg.precision], ep_group=mesh.ep_group, ep_dispatch=cfg.parallel.ep_dispatch,
                   keep_hidden=keeps_hidden(cfg), cp_group=mesh.cp_group if split else None, tp_group=mesh.tp_group if split else None,
                   split_group=mesh.split_group if split else None, stage_group=mesh.stage_group if split else None,
                   cp_split=cfg.parallel.cp_split, cp_attention=cfg.parallel.cp_attention,
                   draw=batch.get("draw", batch["positions_T"].new_zeros(())), training=training, projector=cfg.model.projector)


def keeps_hidden(cfg: Config) -> bool:
    """Whether experts keep their pre-activations until backward: not where most rows of the buffer are for other ranks' experts, nor where
    the layer is computed again anyway, which then needs one product of theirs instead of two."""
    return cfg.parallel.ep == 1 and cfg.train.activation_checkpointing == "none"


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
    """The units of the configured model that this rank of the pipeline has."""
    keeps = zero_stage(cfg.parallel.zero_stage) < 3
    reshard = Reshard(cfg.parallel.reshard_after_forward and not keeps, cfg.parallel.reshard_experts_after_forward and not keeps)
    bind = {"bind": lora.binder(cfg.model.lora)} if cfg.model.lora.rank else {}
    recompute = {"encoder.": cfg.train.activation_checkpointing_encoder, "decoder.layers.": cfg.train.activation_checkpointing}
    sums = torch.bfloat16 if cfg.parallel.reduce_dtype == "bf16" else None
    units = [list(speech_lm.units(cfg, stage)) for stage in own_stages(cfg, mesh.pp_rank)]
    return Engine(speech_lm.spec(cfg), chain.from_iterable(units), mesh, DTYPES[cfg.precision], reshard, cfg.compile, recompute=recompute,
                  sums=sums, apart={first for first, *_ in units[1:]}, turns=turns(cfg, mesh.pp_rank),
                  fetched=offload_of(cfg) == "parameters", halved=halved(cfg, mesh.pp_rank), **bind)


def make_transfers(cfg: Config, mesh: Mesh) -> Transfers:
    """This rank's way to the others of its pipeline."""
    return Transfers(mesh, cfg.model.decoder.d_model, DTYPES[cfg.precision], places(cfg))


def make_state(cfg: Config, mesh: Mesh, known: Mapping[str, Any] | None = None) -> State:
    """The state of this rank of the pipeline before the first step, its parameters drawn where they are not `known`."""
    return init_state(own_spec(cfg, mesh.pp_rank), cfg.seed, mesh, master_dtype(cfg), known, offload_of(cfg), DTYPES[cfg.precision],
                      moment_dtype(cfg))


def offload_of(cfg: Config) -> str:
    """Our name of what is on the host."""
    return offloaded(cfg.parallel.offload)


def state_dtype(cfg: Config) -> torch.dtype:
    """Dtype of gradients and reductions, and of parameters and moments that are not kept narrower."""
    return torch.promote_types(DTYPES[cfg.precision], torch.float32)


def master_dtype(cfg: Config) -> torch.dtype:
    """Dtype of the parameters that are updated."""
    return torch.bfloat16 if cfg.optimizer.master_dtype == "bf16" else state_dtype(cfg)


def moment_dtype(cfg: Config) -> torch.dtype:
    """Dtype of AdamW's moments."""
    return torch.bfloat16 if cfg.optimizer.moment_dtype == "bf16" else state_dtype(cfg)


def make_gradients(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], Gradients]:
    """The function that turns a state and a step's micro-batches into the gradient of the global mean loss."""
    of_rows = _make_gradients(cfg, mesh, engine)
    return lambda state, batches: of_rows(state, numbered(batches, state.step, mesh))


def _make_gradients(cfg: Config, mesh: Mesh, engine: Engine) -> Callable[[State, Sequence[Batch]], Gradients]:
    """The same, of rows with their numbers."""
    holds, defers = zero_stage(cfg.parallel.zero_stage) in (1, 2), defers_gradients(cfg, mesh)
    every_stage = stages(cfg)
    names = {stage.index: trained_paths(cfg, stage) for stage in own_stages(cfg, mesh.pp_rank)}
    total = world_sums(cfg, mesh)

    def forward(leaves: dict[str, Tensor], batch: Batch, counts: dict[str, Tensor]) -> RowLoss:
        batch, context = own_part(cfg, batch, mesh, training=True)
        return row_loss(Pass(engine, leaves, context), batch, counts, cfg)

    if cfg.compile.one_graph:
        forward = torch.compile(forward, fullgraph=True, dynamic=False, options=scheduled(mesh.device))

    def gradients(state: State, rows: Sequence[Batch]) -> Gradients:
        leaves, counts, shared = state.leaves(), label_counts(rows, mesh), Shared(holds, defers)

        def part_of(stage: Stage, row: Batch, x_TD: Tensor | None) -> tuple[Part, dict[str, Tensor]]:
            if cfg.compile.one_graph:
                loss, y_TD, stats = forward(leaves, row, counts)
                return Part(None, x_TD, y_TD, loss), stats
            row, context = own_part(cfg, row, mesh, training=True)
            run = Pass(engine, leaves, context, shared)
            loss, y_TD, stats = row_loss(run, row, counts, cfg, stage, x_TD)
            return Part(run, x_TD, y_TD, loss), stats

        weights = {index: {name: leaves[name] for name in own} for index, own in names.items()}
        work = StepWork(rows, weights, shared, part_of)
        transfers = make_transfers(cfg, mesh)
        actions = actions_of_step(cfg, mesh.pp_rank, len(rows))
        carry_out(actions, every_stage, [own_tokens(mesh, row) for row in rows], transfers, work)
        grads = work.grads
        for name in shared_leaves(cfg):
            if name in grads and mesh.ends_group is not None:
                grad = grads[name].to(mesh.device)  # from the host, if it is there
                grads[name] = all_reduce(grad.contiguous(), mesh.ends_group).to(grads[name].device)
        return Gradients({name: grads[name] for name in state.first}, total(work.sums), counts)

    return gradients


def scheduled(device: torch.device) -> dict[str, Any] | None:
    """Options that have the compiler start collectives of a graph ahead of work that they can run beside, and join small ones.

    None on a CPU, since the compiler estimates times by the rates of a GPU, and in a torch that has no such passes (2.13 has them).
    """
    passes = getattr(torch._inductor.config, "aten_distributed_optimizations", None)
    if device.type != "cuda" or not hasattr(passes, "enable_overlap_scheduling"):
        return None
    return {"aten_distributed_optimizations.enable_overlap_scheduling": True}


def numbered(batches: Sequence[Batch], step: int, mesh: Mesh) -> list[Batch]:
    """The rows of a step with their numbers among the rows of all steps and ranks, of which random draws are a function."""
    numbers = torch.arange(step * len(batches), (step + 1) * len(batches), device=mesh.device) * mesh.dp + mesh.dp_rank
    return [batch | {"draw": number} for batch, number in zip(batches, numbers.unbind(), strict=True)]


def warm_up(cfg: Config, mesh: Mesh, engine: Engine, state: State, row: Batch) -> None:
    """Forward and backward of each of this rank's stages alone, on a row of the right shape; changes no state."""
    leaves, one = state.leaves(), torch.ones((), device=mesh.device)
    for stage in own_stages(cfg, mesh.pp_rank):
        x_TD = None if stage.enters else torch.zeros(own_tokens(mesh, row), cfg.model.decoder.d_model, dtype=DTYPES[cfg.precision],
                                                     device=mesh.device, requires_grad=stage.learns_before)
        part, context = own_part(cfg, row, mesh, training=True)
        run = Pass(engine, leaves, context)
        loss, y_TD, _ = row_loss(run, part, {"lm": one, "ctc": one, "balance": one}, cfg, stage, x_TD)
        part_gradients(stage, Part(run, x_TD, y_TD, loss), y_TD, [leaves[name] for name in trained_paths(cfg, stage)])


def world_sums(cfg: Config, mesh: Mesh) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The function that adds a step's figures up over all ranks; those of other stages arrive too."""
    shapes: dict[str, torch.Size] = {}  # of all stages, told once

    def total(sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if mesh.sizes.pp == 1:
            return all_reduce_together(sums)
        if not shapes:
            for part in gather_objects({name: value.shape for name, value in sums.items()}, mesh.pp_group):
                shapes.update(part)
        zero = torch.zeros((), dtype=state_dtype(cfg), device=mesh.device)
        return all_reduce_together({name: sums[name] if name in sums else zero.expand(shape) for name, shape in shapes.items()})

    return total


def defers_gradients(cfg: Config, mesh: Mesh) -> bool:
    """Whether whole gradients are kept until the last micro-batch of a step and reduced once, the same on every rank.

    parallel.defer_grad_sync=auto keeps them where they are whole anyway (zero stages 0 and 1), else where they fit beside the state.
    """
    choice, stage = cfg.parallel.defer_grad_sync, zero_stage(cfg.parallel.zero_stage)
    if cfg.train.accumulate == 1 or mesh.world == 1 or cfg.compile.one_graph:
        return False
    if choice != "auto" or stage <= 1:
        return choice if isinstance(choice, bool) else True
    leaves = [p for _, p in params.named_leaves(own_spec(cfg, mesh.pp_rank)) if p.kind == "param" and p.trained]
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
    copies = {name: sharding.place(p, mesh).copies * (2 if name in shared_leaves(cfg) else 1) for name, p in spec.items()}
    gradients = _make_gradients(cfg, mesh, engine)

    def work(state: State, rows: Sequence[Batch], step: int | Tensor, lr: float | Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        grads, sums, counts = gradients(state, rows)
        norm = optimizer.global_norm(grads, copies, torch.zeros((), dtype=state_dtype(cfg), device=mesh.device))
        divisor = optimizer.clipping_divisor(norm, cfg.optimizer.clip_norm)
        if state.copies or norm.dtype != torch.float32:  # the memory of the host is slow, and the update takes a divisor in fp32
            optimizer.divide(list(grads.values()), divisor)
            divisor = None
        with torch.no_grad():
            if state.copies:
                grads = dict(zip(grads, to_host(list(grads.values())), strict=True))
            optimizer.update(sharding.local(state.trained), grads, sharding.local(state.first), sharding.local(state.second), step, lr,
                             cfg.optimizer, decayed, divisor)
            state.refresh()
        return speech_lm.update(state.buffers, sums, cfg.model), {"grad_norm": norm, "labels": counts["lm"], **sums}

    recorded = Recorded(work) if cfg.compile.cuda_graph else None

    def step(state: State, batches: Sequence[Batch]) -> tuple[State, dict[str, Tensor]]:
        rows, lr = numbered(batches, state.step, mesh), optimizer.learning_rate(state.step, cfg.optimizer, cfg.train.steps)
        if recorded is not None:
            return replace(state, step=state.step + 1), recorded(state, rows, state.step, lr)
        buffers, metrics = work(state, rows, state.step, lr)
        return replace(state, step=state.step + 1, buffers=buffers), metrics

    return step


def row_loss(run: Pass, batch: Batch, counts: dict[str, Tensor], cfg: Config, stage: Stage | None = None,
             x_TD: Tensor | None = None) -> RowLoss:
    """A stage's share of the global loss of a row (None where it has none), the hidden states for the next stage (None behind the last),
    and sums for metrics and buffers.

    :param counts: see `label_counts`; the only place where a loss is divided by a count of the whole step
    :param stage: None: the whole model
    :param x_TD: hidden states of the stage before
    """
    stage = stage or speech_lm.whole(cfg.model)
    y_TD, losses, stats = speech_lm.part(run, stage, x_TD, batch, run.context, cfg)
    shares = {name: value / counts[name].clamp(min=1) for name, value in losses.items()}
    weights = {"lm": 1.0, "ctc": cfg.train.ctc_weight, "balance": cfg.model.decoder.aux_loss_coeff}
    terms = [share * weights[name] for name, share in shares.items()]
    total = functools.reduce(torch.add, terms) if terms else None
    return total, None if stage.ends else y_TD, stats | {f"loss_{name}": share for name, share in shares.items()}


def to_device(batch: dict[str, Any], mesh: Mesh) -> Batch:
    """The tensors of a batch, on this rank's device."""
    return {name: value.to(mesh.device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}


def label_counts(batches: Sequence[Batch], mesh: Mesh) -> dict[str, Tensor]:
    """Supervised tokens ("lm") and transcript tokens ("ctc") over all micro-batches and all ranks that have rows of their own, and the
    micro-batches of a rank ("balance")."""
    lm = sum(((b["labels_T"] != -100).sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    ctc = sum((b["ctc_lengths_U"].sum() for b in batches), torch.zeros((), dtype=torch.int64, device=mesh.device))
    both = torch.stack([lm, ctc])
    sum_over_ranks(both, mesh.dp_group)
    return {"lm": both[0], "ctc": both[1], "balance": torch.full_like(lm, len(batches))}


def all_reduce_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks, in one collective, as fp32 or wider."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
    flat = torch.cat([t.to(wide).reshape(-1) for t in tensors.values()])
    parts = sum_over_ranks(flat).split([t.numel() for t in tensors.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
