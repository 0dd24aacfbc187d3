"""A speech language model: encoder -> projector -> hybrid decoder that reads audio frames as if they were tokens.

`spec` lists every parameter; `units` the groups of parameters that are gathered together, in the order of use; `part` is the forward pass
of a stage of the pipeline, which may be the whole model; `encode`, `embed` and `layers` are its pieces. They receive
`run(unit, function, *inputs)`, which gathers the unit's weights and calls `function(weights, *inputs, ctx)`: how weights are sharded or
what is compiled is not the model's business.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config, EncoderConfig, ModelConfig
from model import ctc, decoder, fastconformer, lora, mel, projector, whisper, whisper_mel
from model.context import Context
from model.freezing import freeze
from model.params import Tree
from parallel.pipeline import Stage

WHISPERS = ("whisper", "whisper_30s", "glm_asr", "glm_asr_30s")
ENCODERS: dict[str, ModuleType] = {"fastconformer": fastconformer, **dict.fromkeys(WHISPERS, whisper)}
FEATURES = {"fastconformer": mel.log_mel, **dict.fromkeys(WHISPERS, whisper_mel.log_mel)}
Run = Callable[..., Any]
Losses = dict[str, Tensor]
Stats = dict[str, Tensor]  # sums that `update` needs, by unit and name


def spec(cfg: Config) -> Tree:
    """Every parameter and buffer of the model."""
    tree = model_spec(cfg.model)
    if cfg.model.encoder is not None and cfg.train.ctc_weight > 0:
        tree["ctc"] = ctc.spec(cfg.model.encoder.d_model, cfg.model.decoder.vocab_size)
    return lora.extend(freeze(tree, cfg.model.freeze_params, cfg.model.prevent_freeze_params), cfg.model.lora)


def model_spec(cfg: ModelConfig) -> dict[str, Tree]:
    """The same without what only training needs."""
    tree = {"decoder": decoder.spec(cfg.decoder)}
    if cfg.encoder is None:
        return tree
    encoder = ENCODERS[cfg.encoder.kind].spec(cfg.encoder)
    return {"encoder": encoder, "projector": projector.spec(cfg.projector, cfg.encoder, cfg.decoder.d_model)} | tree


def whole(cfg: ModelConfig) -> Stage:
    """The stage that is all of the model."""
    return Stage(0, range(len(cfg.decoder.pattern)))


def units(cfg: Config, stage: Stage | None = None) -> Iterator[tuple[str, ...]]:
    """Subtrees of the parameter tree whose weights travel together, in the order in which `part` uses them."""
    stage = stage or whole(cfg.model)
    if stage.enters:
        yield from entry_units(cfg)
    yield from ((f"decoder.layers.{i}",) for i in stage.layers)
    if stage.ends:
        yield head_unit(cfg.model)


def entry_units(cfg: Config) -> Iterator[tuple[str, ...]]:
    """Those before the decoder's layers."""
    if cfg.model.encoder is not None:
        yield ("encoder.subsampling",)
        yield from ((f"encoder.layers.{i}",) for i in range(cfg.model.encoder.n_layers))
        if cfg.train.ctc_weight > 0:
            yield ("ctc",)
        yield projector_unit(cfg.model.encoder)
    yield ("decoder.embedding",)


def head_unit(cfg: ModelConfig) -> tuple[str, ...]:
    """The final norm and the output matrix, which a tied model shares with its embedding."""
    return ("decoder.head", "decoder.embedding") if cfg.decoder.tie_embeddings else ("decoder.head",)


def projector_unit(cfg: EncoderConfig) -> tuple[str, ...]:
    """The projector, with the norm behind the encoder's layers where there is one."""
    return ("projector",) if cfg.kind == "fastconformer" else ("encoder.norm", "projector")


def encode(run: Run, batch: dict[str, Tensor], ctx: Context, stats: Stats) -> Tensor:
    """Flat encoder frames of the batch's audio row, [A, D] or, with frames of 20 ms, [4 A, D]; adds the layers' sums to `stats`."""
    return encode_features(run, run(None, FEATURES[ctx.encoder.kind], batch["audio_S"]), ctx, stats)


def encode_features(run: Run, mel_AM: Tensor, ctx: Context, stats: Stats) -> Tensor:
    """The same of log-mel features [8 A, M]; the outputs of several layers side by side where the projector reads them."""
    encoder, read = ENCODERS[ctx.encoder.kind], []
    x_AD = run(("encoder.subsampling",), encoder.subsample, mel_AM)
    for i in range(ctx.encoder.n_layers):
        unit = f"encoder.layers.{i}"
        x_AD, sums = run((unit,), encoder.forward, x_AD)
        stats.update({f"{unit}.{name}": value for name, value in sums.items()})
        read += [x_AD] * ctx.projector.encoder_layers.count(i)
    return torch.cat(read, 1) if read else x_AD


def embed(run: Run, x_AD: Tensor | None, batch: dict[str, Tensor], ctx: Context, stats: Stats | None = None) -> Tensor:
    """The token row's embeddings [T, D], whose audio slots take their frames from x_AD; adds the projector's sums to `stats`."""
    if x_AD is None:
        return run(("decoder.embedding",), decoder.embed_text, batch["tokens_T"])
    frames_AD, sums = run(projector_unit(ctx.encoder), projector.forward, x_AD)
    if stats is not None:
        stats.update({f"projector.{name}": value for name, value in sums.items()})
    return run(("decoder.embedding",), decoder.embed, frames_AD, batch["tokens_T"], batch["frames_T"])


def layers(run: Run, x_TD: Tensor, ctx: Context, stats: Stats, numbers: range | None = None,
           visit: Callable[[int, Tensor], None] | None = None) -> Tensor:
    """Hidden states [T, D] behind layers of the decoder; adds the layers' sums to `stats`.

    :param numbers: of the layers; None: all
    :param visit: called with the number of each layer and its input, before it runs
    """
    for i in range(len(ctx.decoder.pattern)) if numbers is None else numbers:
        unit = f"decoder.layers.{i}"
        if visit is not None:
            visit(i, x_TD)
        x_TD, sums = run((unit,), decoder.layer(ctx.decoder, i), x_TD)
        stats.update({f"{unit}.{name}": value for name, value in sums.items()})
    return x_TD


def part(run: Run, stage: Stage, x_TD: Tensor | None, batch: dict[str, Tensor], ctx: Context, cfg: Config) -> tuple[Tensor, Losses, Stats]:
    """What a stage computes of one packed row from the hidden states behind the stage before: its own hidden states, the summed (not
    averaged) losses that it has, "lm" at the end, with an auxiliary head "ctc" at the entry and with aux_loss_coeff "balance" where it has
    experts, and the layers' sums."""
    losses: Losses = {}
    stats: Stats = {}
    if x_TD is None:
        x_AD = encode(run, batch, ctx, stats) if cfg.model.encoder is not None else None
        if x_AD is not None and cfg.train.ctc_weight > 0:
            losses["ctc"] = run(("ctc",), ctc.loss, x_AD, batch["ctc_labels_UL"], batch["ctc_lengths_U"])
        x_TD = embed(run, x_AD, batch, ctx, stats)
    x_TD = layers(run, x_TD, ctx, stats, stage.layers)
    if stage.ends:
        losses["lm"] = run(head_unit(cfg.model), decoder.loss, x_TD, batch["labels_T"])
    balances = [stats.pop(name) for name in list(stats) if name.endswith(".balance")]
    if balances:
        losses["balance"] = functools.reduce(torch.add, balances)
    return x_TD, losses, stats


def update(buffers: dict[str, Tensor], stats: Stats, cfg: ModelConfig) -> dict[str, Tensor]:
    """The buffers (by dotted path) after a step whose sums, over all micro-batches and ranks, were `stats`."""
    out = dict(buffers)
    for prefix, function, layer_cfg in _updates(cfg):
        own = {name.removeprefix(prefix): value for name, value in buffers.items() if name.startswith(prefix)}
        sums = {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}
        if own and sums:
            out |= {prefix + name: value for name, value in function(own, sums, layer_cfg).items()}
    return out


def _updates(cfg: ModelConfig) -> Iterator[tuple[str, Callable[..., dict[str, Tensor]], Any]]:
    for i in range(cfg.encoder.n_layers if cfg.encoder and cfg.encoder.kind == "fastconformer" else 0):
        yield f"encoder.layers.{i}.", fastconformer.update, cfg.encoder
    for i in range(cfg.projector.conformer.n_layers if cfg.encoder else 0):
        yield f"projector.layers.{i}.", fastconformer.update, cfg.projector.conformer
    for i, kind in enumerate(cfg.decoder.pattern):
        if hasattr(decoder.LAYERS[kind], "update"):
            yield f"decoder.layers.{i}.", decoder.LAYERS[kind].update, cfg.decoder
