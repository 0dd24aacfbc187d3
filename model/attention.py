"""Attention layer: causal inside each utterance, grouped queries, rotary positions and norms of queries and keys where wanted."""

from torch import Tensor

from configs.schema import DecoderConfig
from kernels.attention import attention
from kernels.linear import linear
from model.context import Context
from model.norm import rms_norm
from model.params import P, Tree
from model.rope import rotate


def spec(cfg: DecoderConfig) -> Tree:
    """norm, the projections q, k, v and o, and q_norm and k_norm where the model has them."""
    queries, keys = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    tree = {
        "norm": P((cfg.d_model,), ("embed",), "ones"),
        "q": _projection((queries, cfg.d_model), ("queries", "embed"), cfg),
        "k": _projection((keys, cfg.d_model), ("keys", "embed"), cfg),
        "v": _projection((keys, cfg.d_model), ("keys", "embed"), cfg),
        "o": _projection((cfg.d_model, queries), ("embed", "queries"), cfg),
    }
    norm = P((cfg.head_dim,), ("head_dim",), "ones")
    return tree | {"q_norm": norm, "k_norm": norm} if cfg.qk_norm else tree


def _projection(shape: tuple[int, int], axes: tuple[str, str], cfg: DecoderConfig) -> Tree:
    bias = {"bias": P(shape[:1], axes[:1], "zeros")} if cfg.attention_bias else {}
    return {"weight": P(shape, axes, std=cfg.init_std), **bias}


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + o(attention(q, k, v of norm(x))); padding slots keep x, plus the bias of o."""
    cfg = ctx.decoder
    h_TD = rms_norm(x_TD, w["norm"], cfg.norm_eps)
    q_TNH, k_TGH, v_TGH = (_project(w[name], h_TD).unflatten(1, (-1, cfg.head_dim)) for name in ("q", "k", "v"))
    if cfg.qk_norm:
        q_TNH, k_TGH = rms_norm(q_TNH, w["q_norm"], cfg.norm_eps), rms_norm(k_TGH, w["k_norm"], cfg.norm_eps)
    if cfg.rope_theta is not None:
        q_TNH, k_TGH = (rotate(t, ctx.positions_T, cfg.rope_theta) for t in (q_TNH, k_TGH))
    y_TNH, _ = attention(q_TNH, k_TGH, v_TGH, ctx.cu_seqlens_U1, segments_T=ctx.segments_T)
    return x_TD + _project(w["o"], y_TNH.flatten(1)), {}


def _project(w: Tree, x_TD: Tensor) -> Tensor:
    return linear(x_TD, w["weight"], w.get("bias"))
