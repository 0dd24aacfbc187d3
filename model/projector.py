"""From encoder frames to tokens of the language model: frames side by side are merged, then one linear layer or two with a GELU."""

import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig, ProjectorConfig
from model import whisper
from model.context import Context
from model.lengths import COUNTING
from model.linear import linear
from model.params import P, Tree


def spec(cfg: ProjectorConfig, encoder: EncoderConfig, width: int) -> Tree:
    """weight and bias, or those of up and down."""
    inputs = COUNTING[encoder.kind].frames_a_token * encoder.d_model
    if not cfg.hidden:
        return _affine(width, inputs, ("embed", "encoder"))
    return {"up": _affine(cfg.hidden, inputs, ("ffn", "encoder")), "down": _affine(width, cfg.hidden, ("embed", "ffn"))}


def _affine(outputs: int, inputs: int, axes: tuple[str, str]) -> Tree:
    return {"weight": P((outputs, inputs), axes, std=inputs**-0.5), "bias": P((outputs,), axes[:1], "zeros")}


def forward(w: Tree, x_AD: Tensor, ctx: Context) -> Tensor:
    """[tokens, width of the language model]; `w` is the projector's, or {norm, projector} with the norm behind the encoder."""
    if "projector" in w:
        w, x_AD = w["projector"], whisper.norm(w["norm"], x_AD)
    x_AD = x_AD.unflatten(0, (-1, COUNTING[ctx.encoder.kind].frames_a_token)).flatten(1)  # side by side, the first one first
    if "up" not in w:
        return linear(x_AD, w["weight"], w["bias"])
    return linear(F.gelu(linear(x_AD, w["up"]["weight"], w["up"]["bias"])), w["down"]["weight"], w["down"]["bias"])
