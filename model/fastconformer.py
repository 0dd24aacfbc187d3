"""FastConformer encoder (NeMo's definition) over the flat audio row: three masked stride-2 convolutions, then Conformer layers.

Every utterance gets what it would get alone: frames between utterances are masked before each convolution along time, convolution
taps and attention stay within an utterance. Parameters have NeMo's names and shapes, so that loading a checkpoint is a rename.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig
from kernels.conv1d import centred_conv1d
from kernels.depthwise_stride2 import depthwise_stride2
from kernels.relative_attention import relative_attention
from model.audio_row import layout, valid_slots
from model.context import Context
from model.lengths import mel_frames
from model.linear import affine, affine_spec
from model.mel import MEL_PER_FRAME
from model.norm import layer_norm, layer_norm_spec
from model.params import P
from parallel import audio

_NORM_EPS = 1e-5
_MOMENTUM = 0.1  # of the running statistics
_HALVINGS = int(math.log2(MEL_PER_FRAME))  # stride-2 convolutions

Weights = dict[str, Any]
Stats = dict[str, Tensor]


def spec(cfg: EncoderConfig) -> dict[str, Any]:
    return {"subsampling": subsampling_spec(cfg), "layers": [layer_spec(cfg) for _ in range(cfg.n_layers)]}


def subsampling_spec(cfg: EncoderConfig) -> dict[str, Any]:
    width, mel = cfg.subsampling_channels, cfg.mel_bins
    for _ in range(_HALVINGS):
        mel = (mel - 1) // 2 + 1
    conv = {"0": affine_spec((width, 1, 3, 3), ("channels", "one", "taps", "taps"))}
    for depthwise, pointwise in (("2", "3"), ("5", "6")):
        conv[depthwise] = affine_spec((width, 1, 3, 3), ("channels", "one", "taps", "taps"))
        conv[pointwise] = affine_spec((width, width, 1, 1), ("channels", "channels_in", "one", "one"))
    return {"conv": conv, "out": affine_spec((cfg.d_model, width * mel), ("embed", "channels_mel"))}


def subsample(w: Weights, mel: Tensor, ctx: Context) -> Tensor:
    """Log-mel [8 * A, M] -> frames [A, D] in the compute dtype."""
    conv = w["conv"]
    x = _stride2(conv["0"], mel.to(ctx.dtype)[:, :, None], 0, ctx)
    x = affine(conv["3"], _stride2(conv["2"], x, 1, ctx))
    x = affine(conv["6"], _stride2(conv["5"], x, 2, ctx))
    x_AD = affine(w["out"], torch.relu(x.transpose(1, 2).flatten(1)))  # the weight counts mel bins fastest, then channels
    return scaled(x_AD, ctx)


def scaled(x_AD: Tensor, ctx: Context) -> Tensor:
    """What enters the first layer."""
    return x_AD * math.sqrt(ctx.encoder.d_model) if ctx.encoder.xscaling else x_AD


def _stride2(w: Weights, x: Tensor, level: int, ctx: Context) -> Tensor:
    """Convolution of [frames, mel, channels] that halves frames and mel bins; rectifies all but the features themselves."""
    lengths_U = mel_frames(ctx.audio_samples_U)
    for _ in range(level):
        lengths_U = (lengths_U - 1) // 2 + 1
    real = valid_slots(lengths_U, MEL_PER_FRAME >> level, ctx)  # frames outside utterances enter as zeros
    return depthwise_stride2(x, real, w["weight"], w["bias"], rectify=level > 0)


def layer_spec(cfg: EncoderConfig) -> dict[str, Any]:
    norms = ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out")
    return {name: layer_norm_spec(cfg.d_model) for name in norms} | {
        "feed_forward1": _feed_forward_spec(cfg), "self_attn": _attention_spec(cfg),
        "conv": _convolution_spec(cfg), "feed_forward2": _feed_forward_spec(cfg)}


def forward(w: Weights, x_AD: Tensor, ctx: Context) -> tuple[Tensor, Stats]:
    """One Conformer layer; stats are sums over this rank's valid frames (see update)."""
    x_AD = x_AD + 0.5 * _feed_forward(w["feed_forward1"], _norm(w["norm_feed_forward1"], x_AD))
    x_AD = x_AD + _attention(w["self_attn"], _norm(w["norm_self_att"], x_AD), ctx)
    mixed, stats = _convolution(w["conv"], _norm(w["norm_conv"], x_AD), ctx)
    x_AD = x_AD + mixed
    x_AD = x_AD + 0.5 * _feed_forward(w["feed_forward2"], _norm(w["norm_feed_forward2"], x_AD))
    return _norm(w["norm_out"], x_AD), stats


def _norm(w: Weights, x_AD: Tensor) -> Tensor:
    return layer_norm(x_AD, w["weight"], w["bias"], _NORM_EPS)


def _feed_forward_spec(cfg: EncoderConfig) -> dict[str, Any]:
    ffn = cfg.d_model * cfg.ff_expansion
    return {"linear1": affine_spec((ffn, cfg.d_model), ("ffn", "embed"), cfg.bias),
            "linear2": affine_spec((cfg.d_model, ffn), ("embed", "ffn"), cfg.bias)}


def _feed_forward(w: Weights, x_AD: Tensor) -> Tensor:
    return affine(w["linear2"], F.silu(affine(w["linear1"], x_AD)))


def _attention_spec(cfg: EncoderConfig) -> dict[str, Any]:
    d_model, heads = cfg.d_model, cfg.n_heads
    projections = {f"linear_{name}": affine_spec((d_model, d_model), ("heads", "embed"), cfg.bias) for name in "qkv"}
    biases = {name: P((heads, d_model // heads), ("heads", "head_dim"), "zeros") for name in ("pos_bias_u", "pos_bias_v")}
    return projections | biases | {
        "linear_out": affine_spec((d_model, d_model), ("embed", "heads"), cfg.bias),
        "linear_pos": affine_spec((d_model, d_model), ("heads", "embed"), bias=False)}


def _attention(w: Weights, x_AD: Tensor, ctx: Context) -> Tensor:
    heads = (ctx.encoder.n_heads, -1)
    q, k, v = (affine(w[f"linear_{name}"], x_AD).unflatten(1, heads) for name in "qkv")
    wide = torch.promote_types(ctx.dtype, torch.float32)
    positions = relative_positions(ctx.utterance_frames, ctx.encoder.d_model, x_AD.device, wide).to(ctx.dtype)
    table = affine(w["linear_pos"], positions).unflatten(1, heads)
    mixed = relative_attention(q, k, v, table, w["pos_bias_u"], w["pos_bias_v"], layout(ctx))
    return affine(w["linear_out"], mixed.flatten(1))


def relative_positions(frames: int, d_model: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2 * frames - 1, D]: sine (even columns) and cosine (odd) of the distances frames - 1, ..., -(frames - 1)."""
    distances = torch.arange(frames - 1, -frames, -1, dtype=dtype, device=device)
    frequencies = torch.exp(torch.arange(0, d_model, 2, dtype=dtype, device=device) * (-math.log(10000.0) / d_model))
    angles = distances[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


def _convolution_spec(cfg: EncoderConfig) -> dict[str, Any]:
    d_model = cfg.d_model
    norm = layer_norm_spec(d_model, "channels")
    if cfg.conv_norm == "batch_norm":
        norm |= {"running_mean": P((d_model,), ("channels",), "zeros", kind="buffer"),
                 "running_var": P((d_model,), ("channels",), "ones", kind="buffer")}
    return {"pointwise_conv1": affine_spec((2 * d_model, d_model, 1), ("channels", "embed", "one"), cfg.bias),
            "depthwise_conv": affine_spec((d_model, 1, cfg.conv_kernel), ("channels", "one", "taps"), cfg.bias),
            "batch_norm": norm,  # NeMo's name, also for a layer norm
            "pointwise_conv2": affine_spec((d_model, d_model, 1), ("embed", "channels", "one"), cfg.bias)}


def _convolution(w: Weights, x_AD: Tensor, ctx: Context) -> tuple[Tensor, Stats]:
    real = valid_slots(ctx.audio_lengths_U, 1, ctx)[:, None]
    gated = F.glu(affine(w["pointwise_conv1"], x_AD), -1)
    taps = w["depthwise_conv"]
    mixed = centred_conv1d(torch.where(real, gated, 0), taps["weight"].squeeze(1), taps.get("bias"), ctx.audio_segments_A)
    if ctx.encoder.conv_norm == "batch_norm":
        mixed, stats = _batch_norm(w["batch_norm"], mixed, real, ctx)
    else:
        mixed, stats = _norm(w["batch_norm"], mixed), {}
    return affine(w["pointwise_conv2"], F.silu(mixed)), stats


def _batch_norm(w: Weights, x_AD: Tensor, real: Tensor, ctx: Context) -> tuple[Tensor, Stats]:
    """Per-channel normalisation in fp32, in training by the statistics of the valid frames of the whole row, or of all ranks' rows."""
    wide = x_AD.to(torch.promote_types(x_AD.dtype, torch.float32))
    stats: Stats = {}
    if ctx.training and not ctx.encoder.freeze_batch_norm:
        frames = real.sum().to(wide.dtype)
        mean = torch.where(real, wide, 0).sum(0) / frames.clamp(min=1)
        squares = torch.where(real, wide - mean, 0).square().sum(0)
        stats = {"frames": frames, "sum": (frames * mean).detach(), "square_sum": (squares + frames * mean.square()).detach()}
        mean, var = audio.moments(frames, mean, squares, ctx.stage_group if ctx.encoder.sync_batch_norm else ctx.split_group)
    else:
        mean, var = w["running_mean"], w["running_var"]
    scale = w["weight"].to(wide.dtype) * torch.rsqrt(var + _NORM_EPS)
    return ((wide - mean) * scale + w["bias"].to(wide.dtype)).to(x_AD.dtype), stats


def update(buffers: dict[str, Tensor], stats: Stats, cfg: EncoderConfig) -> dict[str, Tensor]:
    """Running statistics after a step with these sums, as torch's BatchNorm: an unbiased variance; unchanged without frames."""
    frames = stats["frames"]
    mean = stats["sum"] / frames.clamp(min=1)
    var = (stats["square_sum"] - frames * mean.square()).clamp(min=0) / (frames - 1).clamp(min=1)
    new = {"conv.batch_norm.running_mean": mean, "conv.batch_norm.running_var": var}
    return {name: torch.where(frames > 1, old.lerp(new[name], _MOMENTUM), old) for name, old in buffers.items()}
