"""Dense MLP layer."""

from torch import Tensor

from configs.schema import DecoderConfig
from kernels.activation import activate, expansion
from model.context import Context
from model.linear import linear
from model.norm import add, residual_norms, rms_norm
from model.params import P, Tree
from parallel import tensor


def spec(cfg: DecoderConfig) -> Tree:
    """norm, up, down, and biases and post_norm where the model has them."""
    return {**residual_norms(cfg), **products(cfg, cfg.mlp_ffn)}


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + down act(up norm(x))."""
    h_TD = rms_norm(x_TD, w["norm"], ctx.decoder.norm_eps)
    return add(w, x_TD, apply(w, h_TD, ctx.decoder.mlp_ffn, ctx), ctx.decoder), {}


def products(cfg: DecoderConfig, ffn: int) -> Tree:
    """The two matrices of an MLP of hidden width `ffn`; swiglu's `up` has its gate rows before its up rows."""
    wide = expansion(cfg.activation) * ffn
    tree = {
        "up": P((wide, cfg.d_model), ("hidden" if wide == ffn else "gate_and_up", "embed"), std=cfg.init_std),
        "down": P((cfg.d_model, ffn), ("embed", "hidden"), std=cfg.init_std),
    }
    biases = {"up_bias": P((wide,), ("hidden",), "zeros"), "down_bias": P((cfg.d_model,), ("embed",), "zeros")}
    return tree | biases if cfg.mlp_bias else tree


def apply(w: Tree, h_TD: Tensor, ffn: int, ctx: Context) -> Tensor:
    """down act(up h) of hidden width `ffn`, without norm and residual. [T, D]"""
    activation = ctx.decoder.activation
    first, count = tensor.own_part((0, ffn), ctx.tp_group)
    rows = [(block * ffn + first, count) for block in range(expansion(activation))]
    bias = tensor.take(w["up_bias"], rows) if "up_bias" in w else None
    a_TF = activate(linear(tensor.gather_tokens(h_TD, ctx), tensor.take(w["up"], rows), bias), activation)
    return tensor.output(a_TF, w["down"], [(first, count)], w.get("down_bias"), ctx)
