"""Mamba-2 layer (Dao & Gu 2024), as NemotronH builds it: the gated norm has one statistic a group, and steps have a lower limit only."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from configs.schema import DecoderConfig
from kernels.activation import widen
from kernels.conv1d import causal_conv1d
from kernels.ssd import ssd
from model.context import Context
from model.linear import linear
from model.norm import add, gated_rms_norm, residual_norms, rms_norm
from model.params import P, Tree
from parallel import sequence, tensor


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
    part, cfg = share(ctx.decoder, ctx.tp_group), ctx.decoder
    gate_TI, channels_TC, dt_TN = _inputs(w, x_TD, ctx)
    channels_TC, dt_TN = _all_slots(channels_TC, dt_TN, part, ctx)
    part = share(cfg, ctx.tp_group, ctx.cp_group)
    bias = tensor.take(w["conv"]["bias"], part.channels(cfg)) if "bias" in w["conv"] else None
    channels_TC = causal_conv1d(channels_TC, tensor.take(w["conv"]["weight"], part.channels(cfg)), bias, ctx.segments_T)
    y_TI = sequence.heads_to_tokens(_scan(w, channels_TC, dt_TN, part, ctx), ctx)
    return _output(w, x_TD, y_TI, gate_TI, ctx), {}


@dataclass(frozen=True)
class Share:
    """The heads, and the groups that they read, of one rank or of all."""

    heads: tensor.Part
    groups: tensor.Part

    def of(self, ranks: int, rank: int) -> "Share":
        """What this share leaves to one of several ranks among which it is split."""
        return Share(tensor.part_of(self.heads, ranks, rank), tensor.part_of(self.groups, ranks, rank))

    def widths(self, cfg: DecoderConfig) -> tuple[int, int, int]:
        """Columns of x (and of the gate), of B and of C."""
        states = self.groups[1] * cfg.mamba_state
        return self.heads[1] * cfg.mamba_head_dim, states, states

    def inner(self, cfg: DecoderConfig) -> tensor.Part:
        """Columns of x among those of all heads."""
        return self.heads[0] * cfg.mamba_head_dim, self.heads[1] * cfg.mamba_head_dim

    def channels(self, cfg: DecoderConfig, within: "Share | None" = None) -> list[tensor.Part]:
        """Columns of x, B and C among those of all heads and groups, or of those `within` which this share is."""
        within = within or share(cfg)
        inner, states, _ = within.widths(cfg)
        head, group = self.heads[0] - within.heads[0], self.groups[0] - within.groups[0]
        own_inner, own_states, _ = self.widths(cfg)
        return [(head * cfg.mamba_head_dim, own_inner), (inner + group * cfg.mamba_state, own_states),
                (inner + states + group * cfg.mamba_state, own_states)]

    def rows(self, cfg: DecoderConfig) -> list[tensor.Part]:
        """Rows of in_proj: gate, x, B, C and dt."""
        inner, channels, _ = _widths(cfg)
        return [self.inner(cfg), *((inner + first, count) for first, count in self.channels(cfg)),
                (inner + channels + self.heads[0], self.heads[1])]


def share(cfg: DecoderConfig, *groups: ProcessGroup | None) -> Share:
    """This rank's share of a layer whose heads are split over the ranks of the first group, each part over those of the next."""
    part = Share((0, cfg.mamba_heads), (0, cfg.mamba_groups))
    for group in groups:
        part = part if group is None else part.of(group.size(), group.rank())
    return part


def _inputs(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, ...]:
    """Gate, what the convolution sees, and dt, before its bias: of this rank's heads."""
    cfg, part = ctx.decoder, share(ctx.decoder, ctx.tp_group)
    h_TD = tensor.gather_tokens(rms_norm(x_TD, w["norm"], cfg.norm_eps), ctx)
    bias = tensor.take(w["in_proj_bias"], part.rows(cfg)) if "in_proj_bias" in w else None
    inner, *states = part.widths(cfg)
    return linear(h_TD, tensor.take(w["in_proj"], part.rows(cfg)), bias).split((inner, inner + sum(states), part.heads[1]), dim=1)


def _all_slots(channels_TC: Tensor, dt_TN: Tensor, part: Share, ctx: Context) -> tuple[Tensor, Tensor]:
    """All slots of the row for fewer of this rank's heads, with context parallelism."""
    if ctx.cp_group is None:
        return channels_TC, dt_TN
    cfg, ranks = ctx.decoder, ctx.cp_group.size()
    parts = [part.of(ranks, rank) for rank in range(ranks)]
    sent = [torch.cat((tensor.take(channels_TC, p.channels(cfg, part), 1), dt_TN.narrow(1, p.heads[0] - part.heads[0], p.heads[1])), 1)
            for p in parts]
    received_TC = sequence.tokens_to_heads(torch.stack(sent), ctx)
    return received_TC[:, : -parts[0].heads[1]], received_TC[:, -parts[0].heads[1] :]


def _output(w: Tree, x_TD: Tensor, y_TI: Tensor, gate_TI: Tensor, ctx: Context) -> Tensor:
    cfg, part = ctx.decoder, share(ctx.decoder, ctx.tp_group)
    weight_I = tensor.take(w["gate_norm"], [part.inner(cfg)])
    if ctx.tp_group is not None and cfg.mamba_groups < ctx.tp_group.size():
        y_TI = tensor.gated_rms_norm(y_TI, gate_TI, weight_I, cfg.norm_eps, cfg.mamba_groups, ctx.tp_group)
    else:
        y_TI = gated_rms_norm(y_TI, gate_TI, weight_I, cfg.norm_eps, part.groups[1])
    return add(w, x_TD, tensor.output(y_TI, w["out_proj"], [part.inner(cfg)], w.get("out_proj_bias"), ctx), cfg)


def _scan(w: Tree, channels_TC: Tensor, dt_TN: Tensor, part: Share, ctx: Context) -> Tensor:
    cfg = ctx.decoder
    x_TNH, b_TGS, c_TGS = _heads(channels_TC, part, cfg)
    a_log, d, dt_bias = (tensor.take(w[name], [part.heads]) for name in ("a_log", "d", "dt_bias"))
    y_TNH = ssd(x_TNH, dt_TN, -torch.exp(widen(a_log)), b_TGS, c_TGS, d, ctx.segments_T,
                chunk=cfg.mamba_chunk, dt_bias_N=dt_bias, dt_limit=(cfg.time_step_min, float("inf")))
    return y_TNH.flatten(1)


def _heads(channels_TC: Tensor, part: Share, cfg: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, N, H], B and C [T, G, S] of the convolution's result."""
    x_TI, b_TJ, c_TJ = channels_TC.split(part.widths(cfg), dim=-1)
    heads, groups = part.heads[1], part.groups[1]
    return x_TI.unflatten(-1, (heads, -1)), b_TJ.unflatten(-1, (groups, -1)), c_TJ.unflatten(-1, (groups, -1))


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
    _, channels_TC, dt_TN = _inputs(w, x_TD, ctx)
    lengths_U = (slots_UL >= 0).sum(1)
    places_UW = lengths_U[:, None] - torch.arange(cfg.mamba_conv - 1, 0, -1, device=x_TD.device)
    cache["window"].copy_(torch.where((places_UW >= 0)[..., None], channels_TC[slots_UL.gather(1, places_UW.clamp(min=0)).clamp(min=0)], 0))
    channels_TC = causal_conv1d(channels_TC, w["conv"]["weight"], w["conv"].get("bias"), ctx.segments_T)
    x_ULNH, b_ULGS, _ = _heads(channels_TC[slots_UL.clamp(min=0)], share(cfg), cfg)
    dt_ULN = torch.where((slots_UL >= 0)[..., None], _steps(w, dt_TN, cfg)[slots_UL.clamp(min=0)], 0)
    logs_ULN = dt_ULN * -torch.exp(widen(w["a_log"]))
    behind_ULN = logs_ULN.flip(1).cumsum(1).flip(1) - logs_ULN
    weighted_ULNH = (torch.exp(behind_ULN) * dt_ULN)[..., None] * widen(x_ULNH)
    grouped = weighted_ULNH.unflatten(2, (cfg.mamba_groups, -1))
    cache["state"].copy_(torch.einsum("ulgrh,ulgs->ugrhs", grouped, widen(b_ULGS)).flatten(1, 2))


def step(w: Tree, x_UD: Tensor, cache: dict[str, Tensor], ctx: Context) -> Tensor:
    """The layer for one more token of each request; writes the cache. [U, D]"""
    cfg = ctx.decoder
    gate_UI, channels_UC, dt_UN = _inputs(w, x_UD, ctx)
    window_UWC = torch.cat((cache["window"], channels_UC[:, None]), 1)
    cache["window"].copy_(window_UWC[:, 1:])
    mixed_UC = (widen(window_UWC) * widen(w["conv"]["weight"]).t()).sum(1)
    if "bias" in w["conv"]:
        mixed_UC = mixed_UC + widen(w["conv"]["bias"])
    x_UNH, b_UGS, c_UGS = (widen(t) for t in _heads(F.silu(mixed_UC).to(x_UD.dtype), share(cfg), cfg))
    b_UNS, c_UNS = (t.repeat_interleave(cfg.mamba_heads // cfg.mamba_groups, 1) for t in (b_UGS, c_UGS))
    dt_UN = _steps(w, dt_UN, cfg)
    decay_UN = torch.exp(dt_UN * -torch.exp(widen(w["a_log"])))
    state_UNHS = decay_UN[..., None, None] * cache["state"] + (dt_UN[..., None] * x_UNH)[..., None] * b_UNS[:, :, None]
    cache["state"].copy_(state_UNHS)
    y_UNH = (state_UNHS * c_UNS[:, :, None]).sum(-1) + widen(w["d"])[:, None] * x_UNH
    return _output(w, x_UD, y_UNH.flatten(1).to(x_UD.dtype), gate_UI, ctx)


def _steps(w: Tree, dt_TN: Tensor, cfg: DecoderConfig) -> Tensor:
    """Step sizes in fp32 or wider."""
    return F.softplus(widen(dt_TN) + widen(w["dt_bias"])).clamp(min=cfg.time_step_min)


def _widths(cfg: DecoderConfig) -> tuple[int, int, int]:
    """Columns of the gate, of what the convolution sees (x, B, C), and of dt."""
    inner = cfg.mamba_heads * cfg.mamba_head_dim
    return inner, inner + 2 * cfg.mamba_groups * cfg.mamba_state, cfg.mamba_heads
