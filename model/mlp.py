"""Dense MLP layer."""

from torch import Tensor

from configs.schema import DecoderConfig
from kernels.activation import activate, expansion
from kernels.linear import linear
from model.context import Context
from model.norm import rms_norm
from model.params import P, Tree


def spec(cfg: DecoderConfig) -> Tree:
    """norm, up, down."""
    return {"norm": P((cfg.d_model,), ("embed",), "ones"), **products(cfg, cfg.mlp_ffn)}


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + down act(up norm(x))."""
    h_TD = rms_norm(x_TD, w["norm"], ctx.decoder.norm_eps)
    return x_TD + apply(w, h_TD, ctx.decoder.activation), {}


def products(cfg: DecoderConfig, ffn: int) -> Tree:
    """The two matrices of an MLP of hidden width `ffn`; swiglu's `up` has its gate rows before its up rows."""
    return {
        "up": P((expansion(cfg.activation) * ffn, cfg.d_model), ("ffn", "embed"), std=cfg.init_std),
        "down": P((cfg.d_model, ffn), ("embed", "ffn"), std=cfg.init_std),
    }


def apply(w: Tree, h_TD: Tensor, activation: str) -> Tensor:
    """down act(up h), without norm and residual. [T, D]"""
    return linear(activate(linear(h_TD, w["up"]), activation), w["down"])
