"""Attention layer whose tokens see only the last tokens before them."""

from torch import Tensor

from model import attention
from model.context import Context
from model.params import Tree

spec, new_cache, fill = attention.spec, attention.new_cache, attention.fill


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """As model/attention.py, within decoder.window tokens."""
    return attention.attend(w, x_TD, ctx, ctx.decoder.window)


def step(w: Tree, x_UD: Tensor, cache: dict[str, Tensor], ctx: Context) -> Tensor:
    """As model/attention.py, within decoder.window tokens."""
    return attention.step_within(w, x_UD, cache, ctx, ctx.decoder.window)
