"""The hybrid language model: embedding, one layer a letter of the pattern, head."""

from collections.abc import Callable, Container
from types import ModuleType

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.linear import linear
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.lookup import lookup
from model import attention, mamba, mlp, moe, window_attention
from model.context import Context
from model.norm import rms_norm
from model.params import P, Tree
from parallel import audio, sequence, tensor

Cache = dict[str, Tensor]
LAYERS: dict[str, ModuleType] = {"M": mamba, "*": attention, "W": window_attention, "E": moe, "-": mlp}


def spec(cfg: DecoderConfig) -> Tree:
    """embedding, layers, head; a tied model's head has only the final norm."""
    table = P((table_rows(cfg), cfg.d_model), ("vocab", "embed"), std=cfg.init_std, drawn=cfg.vocab_size)
    head = {"norm": P((cfg.d_model,), ("embed",), "ones")}
    if not cfg.tie_embeddings:
        head["weight"] = table
    return {"embedding": {"weight": table}, "layers": [LAYERS[kind].spec(cfg) for kind in cfg.pattern], "head": head}


def table_rows(cfg: DecoderConfig) -> int:
    """Rows of the embedding and of the head: the vocabulary and padding."""
    return -(-cfg.vocab_size // cfg.vocab_multiple) * cfg.vocab_multiple


def layer(cfg: DecoderConfig, index: int) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The forward function of layer `index`."""
    return LAYERS[cfg.pattern[index]].forward


def _forward_step(module: ModuleType) -> Callable[..., Tensor]:
    """The step of a layer that keeps nothing between tokens."""
    def step(w: Tree, x_UD: Tensor, cache: Cache, ctx: Context) -> Tensor:
        return module.forward(w, x_UD, ctx)[0]

    return step


STEPS: dict[str, Callable[..., Tensor]] = {kind: getattr(module, "step", None) or _forward_step(module) for kind, module in LAYERS.items()}


def new_caches(cfg: DecoderConfig, requests: int, capacity: int, dtype: torch.dtype, device: torch.device,
               layers: Container[int] | None = None) -> list[Cache]:
    """What each layer keeps between the tokens of a request, at most `capacity` of them, prompt included; empty for some kinds of layer,
    and for those that are not among `layers` (None: all)."""
    return [LAYERS[kind].new_cache(cfg, requests, capacity, dtype, device)
            if hasattr(LAYERS[kind], "new_cache") and (layers is None or i in layers) else {} for i, kind in enumerate(cfg.pattern)]


def embed(w: Tree, frames_AD: Tensor, tokens_T: Tensor, frames_T: Tensor, ctx: Context) -> Tensor:
    """Token embeddings with audio frames spliced in: slot t holds frame frames_T[t], or, where that is -1, token tokens_T[t]. [T, D]"""
    text_TD, frames_T = embed_text(w, tokens_T, ctx), sequence.own_tokens(frames_T, ctx)
    return torch.where((frames_T >= 0)[:, None], lookup(audio.gather_frames(frames_AD, ctx), frames_T), text_TD)


def embed_text(w: Tree, tokens_T: Tensor, ctx: Context) -> Tensor:
    """Token embeddings alone, of this rank's tokens. [T, D]"""
    return tensor.embedding(w["weight"], table_rows(ctx.decoder), sequence.own_slots(tokens_T, ctx), ctx)


def _output(w: Tree) -> tuple[Tensor, Tensor]:
    """Final norm and output matrix, padding included: of the head alone, or of {head, embedding} where they share the matrix."""
    return (w["norm"], w["weight"]) if "norm" in w else (w["head"]["norm"], w["embedding"]["weight"])


def loss(w: Tree, x_TD: Tensor, labels_T: Tensor, ctx: Context) -> Tensor:
    """Sum of the cross-entropy over all labels that are not -100: this rank's share of it."""
    norm, table = _output(w)
    h_TD, labels_T = tensor.gather_tokens(rms_norm(x_TD, norm, ctx.decoder.norm_eps), ctx), sequence.own_slots(labels_T, ctx)
    if ctx.tp_group is not None:
        return tensor.cross_entropy(h_TD, table, table_rows(ctx.decoder), ctx.decoder.vocab_size, labels_T, ctx.tp_group)
    return linear_cross_entropy(h_TD, table[: ctx.decoder.vocab_size], labels_T)[0]


def logits(w: Tree, x_TD: Tensor, slots_U: Tensor, ctx: Context) -> Tensor:
    """fp32 next-token logits after the given slots. [U, V]"""
    norm, table = _output(w)
    return linear(rms_norm(x_TD[slots_U], norm, ctx.decoder.norm_eps), table[: ctx.decoder.vocab_size]).float()
