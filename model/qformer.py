"""Q-Former as NeMo connects it: learned queries, others for each encoder layer that is read, go through the same post-norm layers (BERT's),
which attend to each other and to the layer's frames; what they found in the layers is averaged, with learned weights for each query.

An utterance becomes as many audio tokens as there are queries, whatever its length. Frames of others and between them are not seen.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import QFormerConfig
from kernels.attention import attention
from model.audio_row import bounds
from model.context import Context
from model.linear import affine, affine_spec
from model.norm import layer_norm, layer_norm_spec
from model.params import P

_BERT_EPS, _NORM_EPS = 1e-12, 1e-5
Weights = dict[str, Any]


def spec(cfg: QFormerConfig, n_read: int, width: int) -> Weights:
    """prompts and scores for each of `n_read` encoder layers, layers, and the norm behind the average."""
    layer = {"attention": _attention_spec(width), "cross": _attention_spec(width), "up": affine_spec((cfg.ffn, width), ("ffn", "embed")),
             "down": affine_spec((width, cfg.ffn), ("embed", "ffn")), "norm": layer_norm_spec(width)}
    return {"prompts": [P((1, cfg.queries, width), ("one", "prompts", "embed"), std=1.0) for _ in range(n_read)],
            "scores": P((cfg.queries, n_read), ("prompts", "scores"), "zeros"), "layers": [layer] * cfg.n_layers,
            "norm": layer_norm_spec(width)}


def forward(w: Weights, x_AD: Tensor, ctx: Context) -> Tensor:
    """Encoder layers side by side -> [U queries, D], the queries of one utterance after those of another."""
    cfg, n_read, utterances = ctx.projector.qformer, len(w["prompts"]), len(ctx.audio_starts_U)
    heard_AD = x_AD.unflatten(1, (n_read, -1)).transpose(0, 1).flatten(0, 1)  # the row as each layer made it, one behind another
    x_TD = torch.cat(w["prompts"])[:, None].expand(-1, utterances, -1, -1).flatten(0, 2).to(ctx.dtype)
    documents = torch.arange(n_read * utterances + 1, device=x_AD.device, dtype=torch.int32)
    places, segments_T = documents * cfg.queries, documents[:-1].repeat_interleave(cfg.queries)
    firsts_U = (torch.arange(n_read, device=x_AD.device)[:, None] * len(x_AD) + bounds(ctx)[:-1]).flatten()
    keys_2U = torch.stack((firsts_U, firsts_U + ctx.audio_lengths_U.repeat(n_read))).int()
    for layer in w["layers"]:
        x_TD = _attend(layer["attention"], x_TD, x_TD, cfg.n_heads, places, segments_T, None)
        x_TD = _attend(layer["cross"], x_TD, heard_AD, cfg.n_heads, places, segments_T, keys_2U)
        x_TD = _norm(layer["norm"], x_TD + affine(layer["down"], F.gelu(affine(layer["up"], x_TD))), _BERT_EPS)
    found = x_TD.unflatten(0, (n_read, utterances, cfg.queries))
    share = torch.softmax(w["scores"].float(), -1).to(ctx.dtype).t()[:, None, :, None]
    return _norm(w["norm"], (found * share).sum(0).flatten(0, 1), _NORM_EPS)


def _attend(w: Weights, x_TD: Tensor, keys_SD: Tensor, heads: int, places: Tensor, segments_T: Tensor, keys_2U: Tensor | None) -> Tensor:
    """norm(x + o(attention(q of x, k and v of keys)))"""
    q, k, v = (affine(w[name], t).unflatten(1, (heads, -1)) for name, t in (("q", x_TD), ("k", keys_SD), ("v", keys_SD)))
    mixed, _ = attention(q, k, v, places, segments_T=segments_T, keys_2U=keys_2U, causal=False)
    return _norm(w["norm"], x_TD + affine(w["o"], mixed.flatten(1)), _BERT_EPS)


def _attention_spec(width: int) -> Weights:
    return {**{name: affine_spec((width, width), ("heads", "embed")) for name in "qkv"},
            "o": affine_spec((width, width), ("embed", "heads")), "norm": layer_norm_spec(width)}


def _norm(w: Weights, x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, w["weight"], w["bias"], eps)
