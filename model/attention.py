"""Attention layer: causal inside each utterance, grouped queries, rotary positions and norms of queries and keys where wanted."""

from torch import Tensor

from configs.schema import DecoderConfig
from kernels.attention import attention
from model.context import Context
from model.linear import linear
from model.norm import add, residual_norms, rms_norm
from model.params import P, Tree
from model.rope import rotate


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
    cfg = ctx.decoder
    h_TD = rms_norm(x_TD, w["norm"], cfg.norm_eps)
    q_TNH, k_TGH, v_TGH = (_project(w[name], h_TD).unflatten(1, (-1, cfg.head_dim)) for name in ("q", "k", "v"))
    if cfg.qk_norm:
        q_TNH, k_TGH = rms_norm(q_TNH, w["q_norm"], cfg.norm_eps), rms_norm(k_TGH, w["k_norm"], cfg.norm_eps)
    if cfg.rope_theta is not None:
        q_TNH, k_TGH = (rotate(t, ctx.positions_T, cfg.rope_theta, cfg.rope_fraction, cfg.rope_scaling) for t in (q_TNH, k_TGH))
    y_TNH, _ = attention(q_TNH, k_TGH, v_TGH, ctx.cu_seqlens_U1, segments_T=ctx.segments_T, window=window)
    return add(w, x_TD, _project(w["o"], y_TNH.flatten(1)), cfg), {}


def _project(w: Tree, x_TD: Tensor) -> Tensor:
    return linear(x_TD, w["weight"], w.get("bias"))
