"""From encoder frames to tokens of the language model: one linear layer or two with a GELU, with Conformer layers before it, over several
layers of the encoder side by side, or learned queries that read them (NeMo's connectors; frames of 20 ms are merged four by four)."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig, ProjectorConfig
from model import fastconformer, qformer, whisper
from model.context import Context
from model.lengths import COUNTING
from model.linear import affine
from model.params import P, Tree

Stats = dict[str, Tensor]


def spec(cfg: ProjectorConfig, encoder: EncoderConfig, width: int) -> Tree:
    """weight and bias, or those of up and down; of `several` layers of the encoder; input, layers and output; or the Q-Former's."""
    if cfg.qformer.queries:
        output = _affine(width, encoder.d_model, ("embed", "heads"))
        return {**qformer.spec(cfg.qformer, len(cfg.encoder_layers), encoder.d_model), "output": output}
    if cfg.conformer.n_layers:
        inner = cfg.conformer.d_model
        layers = [fastconformer.layer_spec(cfg.conformer) for _ in range(cfg.conformer.n_layers)]
        return {"input": _affine(inner, encoder.d_model, ("embed", "encoder")), "layers": layers,
                "output": _affine(width, inner, ("embed", "heads"))}
    if cfg.encoder_layers:
        return {"several": _affine(width, len(cfg.encoder_layers) * encoder.d_model, ("embed", "encoder"))}
    inputs = COUNTING[encoder.kind].frames_a_token * encoder.d_model
    if not cfg.hidden:
        return _affine(width, inputs, ("embed", "encoder"))
    return {"up": _affine(cfg.hidden, inputs, ("ffn", "encoder")), "down": _affine(width, cfg.hidden, ("embed", "ffn"))}


def _affine(outputs: int, inputs: int, axes: tuple[str, str]) -> Tree:
    return {"weight": P((outputs, inputs), axes, std=inputs**-0.5), "bias": P((outputs,), axes[:1], "zeros")}


def forward(w: Tree, x_AD: Tensor, ctx: Context) -> tuple[Tensor, Stats]:
    """[tokens, width of the language model], and the sums of Conformer layers; `w` is the projector's, or {norm, projector} with the norm
    behind the encoder. x_AD holds the encoder layers that are read side by side."""
    if "projector" in w:
        w, x_AD = w["projector"], whisper.norm(w["norm"], x_AD)
    stats: Stats = {}
    if ctx.projector.qformer.queries:
        x_AD, w = qformer.forward(w, x_AD, ctx), w["output"]
    elif ctx.projector.conformer.n_layers:
        x_AD, stats = _conformer(w, x_AD, ctx)
        w = w["output"]
    elif ctx.projector.encoder_layers:
        w = w["several"]
    else:
        x_AD = x_AD.unflatten(0, (-1, COUNTING[ctx.encoder.kind].frames_a_token)).flatten(1)  # side by side, the first one first
    if "up" not in w:
        return affine(w, x_AD), stats
    return affine(w["down"], F.gelu(affine(w["up"], x_AD))), stats


def _conformer(w: Tree, x_AD: Tensor, ctx: Context) -> tuple[Tensor, Stats]:
    """The Conformer layers, whose stats carry the path of their layer."""
    inner = replace(ctx, encoder=ctx.projector.conformer)
    stats: Stats = {}
    x_AD = fastconformer.scaled(affine(w["input"], x_AD), inner)
    for i, layer in enumerate(w["layers"]):
        x_AD, sums = fastconformer.forward(layer, x_AD, inner)
        stats |= {f"layers.{i}.{name}": value for name, value in sums.items()}
    return x_AD, stats
