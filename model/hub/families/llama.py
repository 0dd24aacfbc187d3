"""Llama and its relatives: block n is attention and a gated MLP, our letters 2n and 2n + 1."""

from collections.abc import Mapping
from typing import Any

from configs.schema import DecoderConfig, ModelConfig
from model.hub.family import Family
from model.hub.keys import Fixed, Keys, give, layers, read_rope, refuse_others, take, write_rope
from model.hub.rows import affine, row

DECODER = ("decoder.",)
ENDS = (
    row("decoder.embedding.weight", "model.embed_tokens.weight"),
    row("decoder.head.norm", "model.norm.weight"),
    row("decoder.head.weight", "lm_head.weight"),
)
ATTENTION = (
    row("decoder.layers.{2n}.norm", "model.layers.{n}.input_layernorm.weight"),
    *(r for x in "qkvo" for r in affine(f"decoder.layers.{{2n}}.{x}", f"model.layers.{{n}}.self_attn.{x}_proj")),
    *(row(f"decoder.layers.{{2n}}.{x}_norm", f"model.layers.{{n}}.self_attn.{x}_norm.weight") for x in "qk"),
)
MLP = (
    row("decoder.layers.{2n+1}.norm", "model.layers.{n}.post_attention_layernorm.weight"),
    row("decoder.layers.{2n+1}.up", "model.layers.{n}.mlp.gate_proj.weight", "model.layers.{n}.mlp.up_proj.weight"),
    row("decoder.layers.{2n+1}.up_bias", "model.layers.{n}.mlp.gate_proj.bias", "model.layers.{n}.mlp.up_proj.bias"),
    row("decoder.layers.{2n+1}.down", "model.layers.{n}.mlp.down_proj.weight"),
    row("decoder.layers.{2n+1}.down_bias", "model.layers.{n}.mlp.down_proj.bias"),
)
LEFT_OUT = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "rotary frequencies follow from the configuration"}

WIDTHS: Keys = (
    ("d_model", "hidden_size"), ("vocab_size", "vocab_size"), ("n_heads", "num_attention_heads"), ("mlp_ffn", "intermediate_size"),
    ("norm_eps", "rms_norm_eps", 1e-6), ("tie_embeddings", "tie_word_embeddings", False), ("init_std", "initializer_range", 0.02),
)
GATED: Fixed = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0)}


def heads(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of attention heads, which may follow from others."""
    n_heads = content["num_attention_heads"]
    return {"n_kv_heads": content.get("num_key_value_heads") or n_heads,
            "head_dim": content.get("head_dim") or content["hidden_size"] // n_heads}


def decoder(content: Mapping[str, Any], pattern: str, theta: float = 10000.0, fraction: float = 1.0, **more: Any) -> ModelConfig:
    """The configuration of a language model of gated blocks."""
    return ModelConfig(encoder=None, decoder=DecoderConfig(
        pattern=pattern, activation="swiglu", **take(content, WIDTHS), **heads(content), **read_rope(content, theta, fraction), **more))


def common(cfg: ModelConfig, model_type: str) -> dict[str, Any]:
    """What config.json says of any such model."""
    d = cfg.decoder
    return {"model_type": model_type, "num_hidden_layers": len(d.pattern) // 2, "num_key_value_heads": d.n_kv_heads, "head_dim": d.head_dim,
            "hidden_act": "silu", "use_cache": True, **give(d, WIDTHS), **write_rope(d)}


def _read_llama(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, {**GATED, "pretraining_tp": (1,)})
    return decoder(content, "*-" * layers(content), **take(content, _BIASES))


def _write_llama(cfg: ModelConfig) -> dict[str, Any]:
    return common(cfg, "llama") | give(cfg.decoder, _BIASES)


def _read_mistral(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, GATED)
    window = content.get("sliding_window")
    return decoder(content, ("W-" if window else "*-") * layers(content), **({"window": window} if window else {}))


def _write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    return common(cfg, "mistral") | {"sliding_window": cfg.decoder.window if "W" in cfg.decoder.pattern else None}


_BIASES: Keys = (("attention_bias", "attention_bias", False), ("mlp_bias", "mlp_bias", False))
LLAMA = Family("Llama", "llama", "LlamaForCausalLM", DECODER, ((*ENDS, *ATTENTION, *MLP),), _read_llama, _write_llama, LEFT_OUT)
MISTRAL = Family("Mistral", "mistral", "MistralForCausalLM", DECODER, ((*ENDS, *ATTENTION, *MLP),), _read_mistral, _write_mistral, LEFT_OUT)
