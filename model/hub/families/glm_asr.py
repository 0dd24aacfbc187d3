"""GLM-ASR: Whisper's encoder with rotary positions, a merger of 4 frames, and a Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.schema import EncoderConfig, ModelConfig, ProjectorConfig
from model.hub.families.llama import LLAMA
from model.hub.families.whisper import SUBSAMPLING
from model.hub.family import Family, HubError
from model.hub.keys import Fixed, Keys, give, refuse_others, take
from model.hub.rows import affine, renamed
from model.lengths import COUNTING

MERGE = COUNTING["glm_asr"].frames_a_token
_NAMES = {"attention_norm": "input_layernorm", **{x: f"self_attn.{x}_proj" for x in "qkvo"}, "ffn_norm": "post_attention_layernorm",
          "up": "mlp.fc1", "down": "mlp.fc2"}
_ENCODER = (
    *SUBSAMPLING,
    *(r for ours, theirs in _NAMES.items() for r in affine(f"encoder.layers.{{n}}.{ours}", f"layers.{{n}}.{theirs}")),
    *affine("encoder.norm", "norm"),
)
_PROJECTOR = (*affine("projector.up", "multi_modal_projector.linear_1"), *affine("projector.down", "multi_modal_projector.linear_2"))
_ROWS = (*renamed(_ENCODER, {"": "audio_tower."}), *_PROJECTOR, *renamed(LLAMA.variants[0], {"": "language_model."}))
_KEYS: Keys = (("d_model", "hidden_size"), ("n_layers", "num_hidden_layers"), ("n_heads", "num_attention_heads"),
               ("mel_bins", "num_mel_bins"))
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_FIXED: Fixed = {"hidden_act": ("gelu",), "attention_dropout": (0, 0.0)}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, {"projector_hidden_act": ("gelu",)})
    parts = take(content, [("audio", "audio_config"), ("text", "text_config")])
    audio, text = parts["audio"], parts["text"]
    refuse_others(audio, {**_FIXED, "num_key_value_heads": (audio.get("num_attention_heads"),),
                          "intermediate_size": (MERGE * audio.get("hidden_size", 0),)})
    rope = audio.get("rope_parameters") or {}
    if {**_ROPE, **rope} != _ROPE:
        raise HubError(f"config.json asks for rotary positions {rope} in the encoder; served are {_ROPE}")
    model = LLAMA.read(text)
    decoder = replace(model.decoder, tie_embeddings=bool(content.get("tie_word_embeddings", True)))
    return ModelConfig(encoder=EncoderConfig(kind="glm_asr", **take(audio, _KEYS)), decoder=decoder,
                       projector=ProjectorConfig(hidden=2 * decoder.d_model))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    heads, width = cfg.encoder.n_heads, cfg.encoder.d_model
    audio = {"model_type": "glmasr_encoder", "hidden_act": "gelu", "num_key_value_heads": heads, "intermediate_size": MERGE * width,
             "rope_parameters": _ROPE, **give(cfg.encoder, _KEYS)}
    return {"model_type": "glmasr", "projector_hidden_act": "gelu", "tie_word_embeddings": cfg.decoder.tie_embeddings,
            "audio_config": audio, "text_config": LLAMA.write(cfg)}


GLM_ASR = Family("GLM-ASR", "glmasr", "GlmAsrForConditionalGeneration", ("encoder.", "projector.", "decoder."), (_ROWS,), _read, _write)
