"""Whisper's encoder, out of a whole Whisper model."""

from collections.abc import Mapping
from typing import Any

from configs.schema import EncoderConfig, ModelConfig
from model.hub.family import Family
from model.hub.keys import Fixed, Keys, expansion, give, refuse_others, take
from model.hub.rows import affine, renamed, row

SUBSAMPLING = tuple(r for conv in ("conv1", "conv2") for r in affine(f"encoder.subsampling.{conv}", conv))
_NAMES = {"attention_norm": "self_attn_layer_norm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
          "o": "self_attn.out_proj", "ffn_norm": "final_layer_norm", "up": "fc1", "down": "fc2"}
_ROWS = (
    *SUBSAMPLING, row("encoder.subsampling.positions.weight", "embed_positions.weight"),
    *(r for ours, theirs in _NAMES.items() for r in affine(f"encoder.layers.{{n}}.{ours}", f"layers.{{n}}.{theirs}")),
    *affine("encoder.norm", "layer_norm"),
)
_KEYS: Keys = (("d_model", "d_model"), ("n_layers", "encoder_layers"), ("n_heads", "encoder_attention_heads"), ("mel_bins", "num_mel_bins"),
               ("max_positions", "max_source_positions", 1500))
_FIXED: Fixed = {"activation_function": ("gelu",), "scale_embedding": (False,), "dropout": (0, 0.0), "attention_dropout": (0, 0.0),
                 "activation_dropout": (0, 0.0), "encoder_layerdrop": (0, 0.0)}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, _FIXED)
    encoder = take(content, _KEYS)
    return ModelConfig(encoder=EncoderConfig(kind="whisper", ff_expansion=expansion(content, "encoder_ffn_dim", "d_model"), **encoder))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return {"model_type": "whisper", "encoder_ffn_dim": cfg.encoder.ff_expansion * cfg.encoder.d_model, **give(cfg.encoder, _KEYS)}


def _prefixed(prefix: str) -> Any:
    return renamed(_ROWS, {"": prefix})


WHISPER = Family(
    "Whisper encoder", "whisper", "WhisperModel", ("encoder.",), (_prefixed("model.encoder."), _prefixed("encoder."), _ROWS), _read, _write,
    {r"(model\.)?decoder\..*|proj_out\.weight": "the language model takes the place of Whisper's decoder"})
