"""Mamba-2 layer (Dao & Gu 2024), as NemotronH builds it: the gated norm has one statistic a group, and steps have a lower limit only."""

import torch
import torch.nn.functional as F
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
    gate_TI, channels_TC, dt_TN = _inputs(w, x_TD, ctx.decoder)
    channels_TC = causal_conv1d(channels_TC, w["conv"]["weight"], w["conv"].get("bias"), ctx.segments_T)
    return _output(w, x_TD, _scan(w, channels_TC, dt_TN, ctx), gate_TI, ctx.decoder), {}


def _inputs(w: Tree, x_TD: Tensor, cfg: DecoderConfig) -> tuple[Tensor, ...]:
    """Gate, what the convolution sees, and dt, before its bias."""
    h_TD = rms_norm(x_TD, w["norm"], cfg.norm_eps)
    return linear(h_TD, w["in_proj"], w.get("in_proj_bias")).split(_widths(cfg), dim=1)


def _output(w: Tree, x_TD: Tensor, y_TI: Tensor, gate_TI: Tensor, cfg: DecoderConfig) -> Tensor:
    y_TI = gated_rms_norm(y_TI, gate_TI, w["gate_norm"], cfg.norm_eps, cfg.mamba_groups)
    return add(w, x_TD, linear(y_TI, w["out_proj"], w.get("out_proj_bias")), cfg)


def _scan(w: Tree, channels_TC: Tensor, dt_TN: Tensor, ctx: Context) -> Tensor:
    cfg = ctx.decoder
    x_TNH, b_TGS, c_TGS = _heads(channels_TC, cfg)
    y_TNH = ssd(x_TNH, dt_TN, -torch.exp(widen(w["a_log"])), b_TGS, c_TGS, w["d"], ctx.segments_T,
                chunk=cfg.mamba_chunk, dt_bias_N=w["dt_bias"], dt_limit=(cfg.time_step_min, float("inf")))
    return y_TNH.flatten(1)


def _heads(channels_TC: Tensor, cfg: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, N, H], B and C [T, G, S] of the convolution's result."""
    inner, states = cfg.mamba_heads * cfg.mamba_head_dim, cfg.mamba_groups * cfg.mamba_state
    x_TI, b_TJ, c_TJ = channels_TC.split((inner, states, states), dim=-1)
    return (x_TI.unflatten(-1, (cfg.mamba_heads, -1)), b_TJ.unflatten(-1, (cfg.mamba_groups, -1)),
            c_TJ.unflatten(-1, (cfg.mamba_groups, -1)))


def new_cache(cfg: DecoderConfig, requests: int, capacity: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The last inputs of the convolution, window [U, W - 1, C], and the state after them, [U, N, H, S] in fp32 or wider."""
    shape = (requests, cfg.mamba_heads, cfg.mamba_head_dim, cfg.mamba_state)
    return {"window": torch.zeros(requests, cfg.mamba_conv - 1, _widths(cfg)[1], dtype=dtype, device=device),
            "state": torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)}


def fill(w: Tree, x_TD: Tensor, cache: dict[str, Tensor], slots_UL: Tensor, ctx: Context) -> None:
    """Writes the window and the state after each prompt of a row, from the layer's input; slots_UL says where the row has each prompt's
    tokens (-1 beyond its end).

    The state is the sum over the tokens of exp(a times the step sizes behind the token) dt x Bᵀ: one product a head.
    """
    cfg = ctx.decoder
    _, channels_TC, dt_TN = _inputs(w, x_TD, cfg)
    lengths_U = (slots_UL >= 0).sum(1)
    places_UW = lengths_U[:, None] - torch.arange(cfg.mamba_conv - 1, 0, -1, device=x_TD.device)
    cache["window"].copy_(torch.where((places_UW >= 0)[..., None], channels_TC[slots_UL.gather(1, places_UW.clamp(min=0)).clamp(min=0)], 0))
    channels_TC = causal_conv1d(channels_TC, w["conv"]["weight"], w["conv"].get("bias"), ctx.segments_T)
    x_ULNH, b_ULGS, _ = _heads(channels_TC[slots_UL.clamp(min=0)], cfg)
    dt_ULN = torch.where((slots_UL >= 0)[..., None], _steps(w, dt_TN, cfg)[slots_UL.clamp(min=0)], 0)
    logs_ULN = dt_ULN * -torch.exp(widen(w["a_log"]))
    behind_ULN = logs_ULN.flip(1).cumsum(1).flip(1) - logs_ULN
    weighted_ULNH = (torch.exp(behind_ULN) * dt_ULN)[..., None] * widen(x_ULNH)
    grouped = weighted_ULNH.unflatten(2, (cfg.mamba_groups, -1))
    cache["state"].copy_(torch.einsum("ulgrh,ulgs->ugrhs", grouped, widen(b_ULGS)).flatten(1, 2))


def step(w: Tree, x_UD: Tensor, cache: dict[str, Tensor], ctx: Context) -> Tensor:
    """The layer for one more token of each request; writes the cache. [U, D]"""
    cfg = ctx.decoder
    gate_UI, channels_UC, dt_UN = _inputs(w, x_UD, cfg)
    window_UWC = torch.cat((cache["window"], channels_UC[:, None]), 1)
    cache["window"].copy_(window_UWC[:, 1:])
    mixed_UC = (widen(window_UWC) * widen(w["conv"]["weight"]).t()).sum(1)
    if "bias" in w["conv"]:
        mixed_UC = mixed_UC + widen(w["conv"]["bias"])
    x_UNH, b_UGS, c_UGS = (widen(t) for t in _heads(F.silu(mixed_UC).to(x_UD.dtype), cfg))
    b_UNS, c_UNS = (t.repeat_interleave(cfg.mamba_heads // cfg.mamba_groups, 1) for t in (b_UGS, c_UGS))
    dt_UN = _steps(w, dt_UN, cfg)
    decay_UN = torch.exp(dt_UN * -torch.exp(widen(w["a_log"])))
    state_UNHS = decay_UN[..., None, None] * cache["state"] + (dt_UN[..., None] * x_UNH)[..., None] * b_UNS[:, :, None]
    cache["state"].copy_(state_UNHS)
    y_UNH = (state_UNHS * c_UNS[:, :, None]).sum(-1) + widen(w["d"])[:, None] * x_UNH
    return _output(w, x_UD, y_UNH.flatten(1).to(x_UD.dtype), gate_UI, cfg)


def _steps(w: Tree, dt_TN: Tensor, cfg: DecoderConfig) -> Tensor:
    """Step sizes in fp32 or wider."""
    return F.softplus(widen(dt_TN) + widen(w["dt_bias"])).clamp(min=cfg.time_step_min)


def _widths(cfg: DecoderConfig) -> tuple[int, int, int]:
    """Columns of the gate, of what the convolution sees (x, B, C), and of dt."""
    inner = cfg.mamba_heads * cfg.mamba_head_dim
    return inner, inner + 2 * cfg.mamba_groups * cfg.mamba_state, cfg.mamba_heads
