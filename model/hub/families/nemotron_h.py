"""Nemotron-H and Nemotron 3: one mixer a layer, as our letters; its letters are ours too."""

from collections.abc import Mapping
from typing import Any

from configs.schema import DecoderConfig, ModelConfig
from model.hub.families.llama import DECODER
from model.hub.family import Family, HubError
from model.hub.keys import Fixed, Keys, give, refuse_others, take
from model.hub.rows import Row, renamed, row

_LAYER = {  # ours: theirs, under decoder.layers.{n} and backbone.layers.{n}
    "norm": "norm.weight",
    **{f"{x}.weight": f"mixer.{x}_proj.weight" for x in "qkvo"},
    "in_proj": "mixer.in_proj.weight", "in_proj_bias": "mixer.in_proj.bias", "out_proj": "mixer.out_proj.weight",
    "out_proj_bias": "mixer.out_proj.bias", "conv.bias": "mixer.conv1d.bias", "a_log": "mixer.A_log", "d": "mixer.D",
    "dt_bias": "mixer.dt_bias", "gate_norm": "mixer.norm.weight",
    "up": "mixer.up_proj.weight", "up_bias": "mixer.up_proj.bias", "down": "mixer.down_proj.weight", "down_bias": "mixer.down_proj.bias",
    "router.weight": "mixer.gate.weight", "router.bias": "mixer.gate.e_score_correction_bias",
    "experts.up": "mixer.experts.{e}.up_proj.weight", "experts.down": "mixer.experts.{e}.down_proj.weight",
    **{f"shared.{x}": f"mixer.shared_experts.{x}_proj.weight" for x in ("up", "down")},
    **{f"shared.{x}_bias": f"mixer.shared_experts.{x}_proj.bias" for x in ("up", "down")},
    **{f"latent_in.{x}": f"mixer.fc1_latent_proj.{x}" for x in ("weight", "bias")},
    **{f"latent_out.{x}": f"mixer.fc2_latent_proj.{x}" for x in ("weight", "bias")},
}
ROWS: tuple[Row, ...] = (
    row("decoder.embedding.weight", "backbone.embeddings.weight"),
    row("decoder.head.norm", "backbone.norm_f.weight"),
    row("decoder.head.weight", "lm_head.weight"),
    row("decoder.layers.{n}.conv.weight", "backbone.layers.{n}.mixer.conv1d.weight", layout="unit"),
    *(row(f"decoder.layers.{{n}}.{ours}", f"backbone.layers.{{n}}.{theirs}") for ours, theirs in _LAYER.items()),
)

_KEYS: Keys = (
    ("d_model", "hidden_size"), ("vocab_size", "vocab_size"), ("tie_embeddings", "tie_word_embeddings", False),
    ("norm_eps", "layer_norm_epsilon", 1e-5), ("init_std", "initializer_range", 0.02), ("n_heads", "num_attention_heads"),
    ("n_kv_heads", "num_key_value_heads"), ("head_dim", "head_dim"), ("mamba_heads", "mamba_num_heads"),
    ("mamba_head_dim", "mamba_head_dim"), ("mamba_groups", "n_groups"), ("mamba_state", "ssm_state_size"),
    ("mamba_conv", "conv_kernel", 4), ("mamba_chunk", "chunk_size", 128), ("mamba_bias", "use_bias", False),
    ("mamba_conv_bias", "use_conv_bias", True), ("time_step_min", "time_step_min", 0.001), ("time_step_max", "time_step_max", 0.1),
    ("mlp_ffn", "intermediate_size"), ("mlp_bias", "mlp_bias", False),
)
_MOE: Keys = (
    ("n_experts", "n_routed_experts"), ("top_k", "num_experts_per_tok"), ("moe_ffn", "moe_intermediate_size"),
    ("shared_ffn", "moe_shared_expert_intermediate_size"), ("moe_latent", "moe_latent_size", 0), ("n_group", "n_group", 1),
    ("topk_group", "topk_group", 1), ("norm_topk", "norm_topk_prob", True), ("routed_scaling", "routed_scaling_factor", 1.0),
)
_FIXED: Fixed = {
    "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish"), "attention_bias": (False,), "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0), "mamba_proj_bias": (False,), "residual_in_fp32": (False,), "n_shared_experts": (1,)}
_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


def _pattern(content: Mapping[str, Any]) -> str:
    kinds = content.get("layers_block_type") or content.get("layer_types")
    if kinds is None:
        pattern: str = take(content, [("pattern", "hybrid_override_pattern")])["pattern"]
        return pattern
    unknown = sorted(set(kinds) - set(_LETTERS))
    if unknown:
        raise HubError(f"config.json has layers of kind {', '.join(unknown)}; served are {', '.join(_LETTERS)}")
    return "".join(_LETTERS[kind] for kind in kinds)


def _read(content: Mapping[str, Any]) -> ModelConfig:
    refuse_others(content, _FIXED)
    content = {"head_dim": content.get("attention_head_dim"), **content}  # the first Nemotron-H named it so
    pattern = _pattern(content)
    experts = take(content, _MOE) if "E" in pattern else {}
    return ModelConfig(encoder=None, decoder=DecoderConfig(pattern=pattern, activation="relu2", **take(content, _KEYS), **experts))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    d = cfg.decoder
    experts = give(d, _MOE) | {"n_shared_experts": 1, "moe_latent_size": d.moe_latent or None} if "E" in d.pattern else {}
    return {"model_type": "nemotron_h", "num_hidden_layers": len(d.pattern), "hybrid_override_pattern": d.pattern,
            "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
            "norm_eps": d.norm_eps, "use_cache": True, **give(d, _KEYS), **experts}


NEMOTRON_H = Family(
    "Nemotron-H", "nemotron_h", "NemotronHForCausalLM", DECODER, (ROWS, renamed(ROWS, {"backbone.": "model."})), _read, _write,
    {r"(backbone\.|model\.)?mtp\..*": "the head that predicts several tokens is not built here"}, {"num_nextn_predict_layers": 0})
