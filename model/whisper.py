"""Whisper's encoder over the flat audio row, and GLM-ASR's, which is the same with rotary positions.

Two convolutions make frames of 20 ms, four a frame of the row; then pre-norm layers whose attention sees the whole utterance. An utterance
is encoded at its own length, or, as kind whisper_30s or glm_asr_30s, with the silence up to 30 seconds that the owners' front ends append.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig
from kernels.attention import attention
from model.audio_row import bounds, slot_positions, valid_slots
from model.context import Context
from model.lengths import COUNTING, halved
from model.lengths import WHISPER_FRAMES_PER_SLOT as RATE
from model.linear import affine, affine_spec
from model.norm import layer_norm, layer_norm_spec
from model.params import P
from model.rope import rotate

_NORM_EPS = 1e-5
_THETA, _FRACTION = 10000.0, 0.5  # of GLM-ASR's rotary positions
Weights = dict[str, Any]


def spec(cfg: EncoderConfig) -> dict[str, Any]:
    """subsampling, layers, and the norm behind them."""
    return {"subsampling": subsampling_spec(cfg), "layers": [layer_spec(cfg) for _ in range(cfg.n_layers)],
            "norm": layer_norm_spec(cfg.d_model)}


def subsampling_spec(cfg: EncoderConfig) -> dict[str, Any]:
    """conv1, conv2, and Whisper's table of positions."""
    tree = {"conv1": _convolution_spec(cfg.d_model, cfg.mel_bins), "conv2": _convolution_spec(cfg.d_model, cfg.d_model)}
    if cfg.kind.startswith("whisper"):
        tree["positions"] = {"weight": P((cfg.max_positions, cfg.d_model), ("positions", "embed"), "sinusoids", kind="buffer")}
    return tree


def subsample(w: Weights, mel: Tensor, ctx: Context) -> Tensor:
    """Log-mel [8 * A, M] -> frames [4 * A, D] in the compute dtype."""
    real = valid_slots(COUNTING[ctx.encoder.kind].mel(ctx.audio_samples_U), 2 * RATE, ctx)[:, None]
    x = F.gelu(_convolve(w["conv1"], torch.where(real, mel.to(ctx.dtype), 0), 1))
    x_AD = F.gelu(_convolve(w["conv2"], torch.where(real, x, 0), 2))
    if "positions" in w:
        table = w["positions"]["weight"]
        x_AD = x_AD + table[slot_positions(RATE, ctx).clamp(max=len(table) - 1)].to(x_AD.dtype)
    return x_AD


def _convolution_spec(width: int, inputs: int) -> dict[str, P]:
    weight = P((width, inputs, 3), ("channels", "embed", "taps"), std=(9 * inputs) ** -0.5)
    return {"weight": weight, "bias": P((width,), ("channels",), "zeros")}


def _convolve(w: Weights, x_TC: Tensor, stride: int) -> Tensor:
    """Three taps along the row, zeros beyond its ends; utterances are apart by at least one frame of zeros."""
    return F.conv1d(x_TC.t()[None], w["weight"], w["bias"], stride, padding=1)[0].t()


def layer_spec(cfg: EncoderConfig) -> dict[str, Any]:
    """Two norms, the projections q, k (without a bias), v and o, and a feed-forward layer."""
    d, ffn = cfg.d_model, cfg.d_model * cfg.ff_expansion
    return {
        "attention_norm": layer_norm_spec(d), **{x: affine_spec((d, d), ("heads", "embed"), bias=x != "k") for x in "qkv"},
        "o": affine_spec((d, d), ("embed", "heads")),
        "ffn_norm": layer_norm_spec(d), "up": affine_spec((ffn, d), ("ffn", "embed")), "down": affine_spec((d, ffn), ("embed", "ffn"))}


def forward(w: Weights, x_AD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + o(attention(norm(x))), then + down(gelu(up(norm(.))))."""
    x_AD = x_AD + _attention(w, norm(w["attention_norm"], x_AD), ctx)
    h_AD = norm(w["ffn_norm"], x_AD)
    return x_AD + affine(w["down"], F.gelu(affine(w["up"], h_AD))), {}


def norm(w: Weights, x_AD: Tensor) -> Tensor:
    """Layer norm, as also stands behind the last layer."""
    return layer_norm(x_AD, w["weight"], w["bias"], _NORM_EPS)


def _attention(w: Weights, h_AD: Tensor, ctx: Context) -> Tensor:
    q, k, v = (affine(w[name], h_AD).unflatten(1, (ctx.encoder.n_heads, -1)) for name in "qkv")
    if ctx.encoder.kind.startswith("glm_asr"):
        positions = slot_positions(RATE, ctx)
        q, k = (rotate(t, positions, _THETA, _FRACTION) for t in (q, k))
    places, keys = _places(ctx)
    mixed, _ = attention(q, k, v, places, segments_T=ctx.audio_segments_A.repeat_interleave(RATE), keys_2U=keys, causal=False)
    return affine(w["o"], mixed.flatten(1))


def _places(ctx: Context) -> tuple[Tensor, Tensor]:
    """Boundaries of the utterances' places in the row of frames [U + 1], and of the frames among them that are real [2, U]."""
    places_U1 = bounds(ctx) * RATE
    real_U = halved(COUNTING[ctx.encoder.kind].mel(ctx.audio_samples_U))
    return places_U1.int(), torch.stack((places_U1[:-1], places_U1[:-1] + real_U)).int()
