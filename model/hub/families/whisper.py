"""Whisper's encoder, out of a whole Whisper model."""

from collections.abc import Mapping
from typing import Any

from configs.schema import EncoderConfig, ModelConfig
from model.hub.family import Family, HubError
from model.hub.keys import Fixed, Keys, give, refuse_others, take
from model.hub.rows import renamed, row

SUBSAMPLING = tuple(row(f"encoder.subsampling.{conv}.{part}", f"{conv}.{part}")
                    for conv in ("conv1", "conv2") for part in ("weight", "bias"))
_NAMES = {"attention_norm": "self_attn_layer_norm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
          "o": "self_attn.out_proj", "ffn_norm": "final_layer_norm", "up": "fc1", "down": "fc2"}
_ROWS = (
    *SUBSAMPLING, row("encoder.subsampling.positions.weight", "embed_positions.weight"),
    *(row(f"encoder.layers.{{n}}.{ours}.{part}", f"layers.{{n}}.{theirs}.{part}") for ours, theirs in _NAMES.items()
      for part in ("weight", "bias")),
    *(row(f"encoder.norm.{part}", f"layer_norm.{part}") for part in ("weight", "bias")),
)
_KEYS: Keys = (("d_model", "d_model"), ("n_layers", "encoder_layers"), ("n_heads", "encoder_attention_heads"), ("mel_bins", "num_mel_bins"),
               ("max_positions", "max_source_positions", 1500))
_FIXED: Fixed = {"activation_function": ("gelu",), "scale_embedding": (False,), "dropout": (0, 0.0), "attention_dropout": (0, 0.0),
                 "activation_dropout": (0, 0.0), "encoder_layerdrop": (0, 0.0)}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, _FIXED)
    encoder = EncoderConfig(kind="whisper", **take(content, _KEYS))
    ffn = take(content, [("ffn", "encoder_ffn_dim")])["ffn"]
    if ffn % encoder.d_model:
        raise HubError(f"config.json has encoder_ffn_dim={ffn}, which is no multiple of d_model={encoder.d_model}")
    encoder.ff_expansion = ffn // encoder.d_model
    return ModelConfig(encoder=encoder)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return {"model_type": "whisper", "encoder_ffn_dim": cfg.encoder.ff_expansion * cfg.encoder.d_model, **give(cfg.encoder, _KEYS)}


def _prefixed(prefix: str) -> Any:
    return renamed(_ROWS, {"": prefix})


WHISPER = Family(
    "Whisper encoder", "whisper", "WhisperModel", ("encoder.",), (_prefixed("model.encoder."), _prefixed("encoder."), _ROWS), _read, _write,
    {r"(model\.)?decoder\..*|proj_out\.weight": "the language model takes the place of Whisper's decoder"})
