"""Attention layer: causal inside each utterance, grouped queries, rotary positions and norms of queries and keys where wanted."""

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.attention import attention
from model.context import Context
from model.linear import linear
from model.norm import add, residual_norms, rms_norm
from model.params import P, Tree
from model.rope import BY_LENGTH, rotate
from parallel import sequence, tensor


def spec(cfg: DecoderConfig) -> Tree:
    """norm, the projections q, k, v and o, and q_norm and k_norm where the model has them."""
    queries, keys = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    tree = {
        **residual_norms(cfg),
        "q": _projection((queries, cfg.d_model), ("queries", "embed"), cfg.init_std, cfg.attention_bias),
        "k": _projection((keys, cfg.d_model), ("keys", "embed"), cfg.init_std, cfg.attention_bias),
        "v": _projection((keys, cfg.d_model), ("keys", "embed"), cfg.init_std, cfg.attention_bias),
        "o": _projection((cfg.d_model, queries), ("embed", "queries"), cfg.init_std, cfg.attention_bias and cfg.attention_out_bias),
    }
    norm = P((cfg.head_dim,), ("head_dim",), "ones")
    return tree | {"q_norm": norm, "k_norm": norm} if cfg.qk_norm else tree


def _projection(shape: tuple[int, int], axes: tuple[str, str], std: float, bias: bool) -> Tree:
    return {"weight": P(shape, axes, std=std), **({"bias": P(shape[:1], axes[:1], "zeros")} if bias else {})}


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + o(attention(q, k, v of norm(x))); padding slots keep x, plus the bias of o."""
    return attend(w, x_TD, ctx, None)


def attend(w: Tree, x_TD: Tensor, ctx: Context, window: int | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The layer, where a token sees all tokens before it or the last `window`, itself included."""
    q_TNH, k_TGH, v_TGH = _heads(w, x_TD, ctx, "qkv")
    return add(w, x_TD, _output(w["o"], sequence.attend(q_TNH, k_TGH, v_TGH, ctx, window), ctx), ctx.decoder), {}


def _heads(w: Tree, x_TD: Tensor, ctx: Context, names: str) -> list[Tensor]:
    """This rank's heads of norm(x) that are named, of q, k and v: normed and rotated as the model wants it."""
    cfg = ctx.decoder
    h_TD = tensor.gather_tokens(rms_norm(x_TD, w["norm"], cfg.norm_eps), ctx)
    heads = [_project(w[name], h_TD, cfg.n_heads if name == "q" else cfg.n_kv_heads, ctx) for name in names]
    if cfg.qk_norm:
        heads = [t if name == "v" else rms_norm(t, w[f"{name}_norm"], cfg.norm_eps) for name, t in zip(names, heads, strict=True)]
    if cfg.rope_theta is not None:
        positions_T = sequence.own_slots(ctx.positions_T, ctx)
        lengths_T = _lengths(positions_T, ctx) if cfg.rope_scaling.kind in BY_LENGTH else None
        heads = [t if name == "v" else rotate(t, positions_T, cfg.rope_theta, cfg.rope_fraction, cfg.rope_scaling, lengths_T)
                 for name, t in zip(names, heads, strict=True)]
    return heads


def _lengths(positions_T: Tensor, ctx: Context) -> Tensor:
    """Tokens of the document of each of this rank's slots; in generation those so far."""
    sizes_P = torch.cat((ctx.cu_seqlens_U1.diff(), ctx.cu_seqlens_U1.new_zeros(1)))
    return torch.maximum(sizes_P[sequence.own_slots(ctx.segments_T, ctx).long()], positions_T + 1)


def new_cache(cfg: DecoderConfig, requests: int, capacity: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Keys and values of `capacity` tokens a request: k and v [U, capacity, G, H]."""
    return {name: torch.zeros(requests, capacity, cfg.n_kv_heads, cfg.head_dim, dtype=dtype, device=device) for name in ("k", "v")}


def fill(w: Tree, x_TD: Tensor, cache: dict[str, Tensor], slots_UL: Tensor, ctx: Context) -> None:
    """Writes what later tokens need of a row of prompts, from the layer's input; slots_UL says where the row has each prompt's tokens (-1
    beyond its end, where the cache gets something that nothing reads)."""
    for name, heads in zip("kv", _heads(w, x_TD, ctx, "kv"), strict=True):
        cache[name][:, : slots_UL.shape[1]] = heads[slots_UL.clamp(min=0)]


def step(w: Tree, x_UD: Tensor, cache: dict[str, Tensor], ctx: Context) -> Tensor:
    """The layer for one more token of each request, at positions_T of its own; writes the cache. [U, D]"""
    return step_within(w, x_UD, cache, ctx, None)


def step_within(w: Tree, x_UD: Tensor, cache: dict[str, Tensor], ctx: Context, window: int | None) -> Tensor:
    """The same for a layer with or without a window."""
    requests, capacity = cache["k"].shape[:2]
    q_UNH, *new = _heads(w, x_UD, ctx, "qkv")
    numbers = torch.arange(requests, device=x_UD.device)
    for name, heads in zip("kv", new, strict=True):
        cache[name][numbers, ctx.positions_T] = heads
    first_U = (numbers * capacity).int()
    keys_2U = torch.stack((first_U, first_U + ctx.positions_T.int() + 1))
    y_UNH, _ = attention(q_UNH, cache["k"].flatten(0, 1), cache["v"].flatten(0, 1), torch.arange(requests + 1, device=x_UD.device).int(),
                         segments_T=numbers.int(), keys_2U=keys_2U, window=window)
    return add(w, x_UD, _output(w["o"], y_UNH, ctx), ctx.decoder)


def _project(w: Tree, x_TD: Tensor, heads: int, ctx: Context) -> Tensor:
    """This rank's part of `heads` heads. [T, N, H]"""
    first, count = tensor.own_part((0, heads), ctx.tp_group)
    rows = [(first * ctx.decoder.head_dim, count * ctx.decoder.head_dim)]
    bias = tensor.take(w["bias"], rows) if "bias" in w else None
    return linear(x_TD, tensor.take(w["weight"], rows), bias).unflatten(1, (count, -1))


def _output(w: Tree, y_TNH: Tensor, ctx: Context) -> Tensor:
    """The projection of all ranks' heads. [T, D]"""
    size = ctx.decoder.head_dim
    first, count = tensor.own_part((0, ctx.decoder.n_heads), ctx.tp_group)
    return tensor.output(y_TNH.flatten(1), w["weight"], [(first * size, count * size)], w.get("bias"), ctx)
