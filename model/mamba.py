"""Mamba-2 layer (Dao & Gu 2024), as NemotronH builds it: the gated norm has one statistic a group, and steps have a lower limit only."""

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.activation import widen
from kernels.conv1d import causal_conv1d
from kernels.ssd import ssd
from model.context import Context
from model.linear import linear
from model.norm import add, gated_rms_norm, residual_norms, rms_norm
from model.params import P, Tree


def spec(cfg: DecoderConfig) -> Tree:
    """norm, in_proj, conv, a_log, d, dt_bias, gate_norm, out_proj; in_proj's rows are gate, x, B, C and dt."""
    inner, channels, _ = _widths(cfg)
    tree = {
        **residual_norms(cfg),
        "in_proj": P((sum(_widths(cfg)), cfg.d_model), ("mamba_projection", "embed"), std=cfg.init_std),
        "conv": {"weight": P((channels, cfg.mamba_conv), ("conv", "taps"), std=(3 * cfg.mamba_conv) ** -0.5)},
        "a_log": P((cfg.mamba_heads,), ("mamba_heads",), "log_uniform", low=1, high=16),
        "d": P((cfg.mamba_heads,), ("mamba_heads",), "ones"),
        "dt_bias": P((cfg.mamba_heads,), ("mamba_heads",), "dt_bias", low=cfg.time_step_min, high=cfg.time_step_max),
        "gate_norm": P((inner,), ("mamba_inner",), "ones"),
        "out_proj": P((cfg.d_model, inner), ("embed", "mamba_inner"), std=cfg.init_std),
    }
    if cfg.mamba_conv_bias:
        tree["conv"]["bias"] = P((channels,), ("conv",), "zeros")
    if cfg.mamba_bias:
        tree["in_proj_bias"] = P((sum(_widths(cfg)),), ("mamba_projection",), "zeros")
        tree["out_proj_bias"] = P((cfg.d_model,), ("embed",), "zeros")
    return tree


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + out_proj(gated_norm(scan(conv(in_proj(norm(x)))))); padding slots are one more document."""
    cfg = ctx.decoder
    h_TD = rms_norm(x_TD, w["norm"], cfg.norm_eps)
    gate_TI, channels_TC, dt_TN = linear(h_TD, w["in_proj"], w.get("in_proj_bias")).split(_widths(cfg), dim=1)
    channels_TC = causal_conv1d(channels_TC, w["conv"]["weight"], w["conv"].get("bias"), ctx.segments_T)
    y_TI = _scan(w, channels_TC, dt_TN, ctx)
    y_TI = gated_rms_norm(y_TI, gate_TI, w["gate_norm"], cfg.norm_eps, cfg.mamba_groups)
    return add(w, x_TD, linear(y_TI, w["out_proj"], w.get("out_proj_bias")), cfg), {}


def _scan(w: Tree, channels_TC: Tensor, dt_TN: Tensor, ctx: Context) -> Tensor:
    cfg = ctx.decoder
    inner, states = cfg.mamba_heads * cfg.mamba_head_dim, cfg.mamba_groups * cfg.mamba_state
    x_TI, b_TJ, c_TJ = channels_TC.split((inner, states, states), dim=1)
    b_TGS, c_TGS = (t.unflatten(1, (cfg.mamba_groups, -1)) for t in (b_TJ, c_TJ))
    y_TNH = ssd(x_TI.unflatten(1, (cfg.mamba_heads, -1)), dt_TN, -torch.exp(widen(w["a_log"])), b_TGS, c_TGS, w["d"], ctx.segments_T,
                chunk=cfg.mamba_chunk, dt_bias_N=w["dt_bias"], dt_limit=(cfg.time_step_min, float("inf")))
    return y_TNH.flatten(1)


def _widths(cfg: DecoderConfig) -> tuple[int, int, int]:
    """Columns of the gate, of what the convolution sees (x, B, C), and of dt."""
    inner = cfg.mamba_heads * cfg.mamba_head_dim
    return inner, inner + 2 * cfg.mamba_groups * cfg.mamba_state, cfg.mamba_heads
