"""Qwen 2 and 3, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from configs.schema import ModelConfig
from model.hub.families.llama import ATTENTION, DECODER, ENDS, GATED, LEFT_OUT, MLP, common, decoder
from model.hub.family import Family
from model.hub.keys import Keys, give, layers, refuse_others, take
from model.hub.rows import row

_EXPERTS = (
    row("decoder.layers.{2n+1}.router.weight", "model.layers.{n}.mlp.gate.weight"),
    row("decoder.layers.{2n+1}.experts.up", "model.layers.{n}.mlp.experts.{e}.gate_proj.weight",
        "model.layers.{n}.mlp.experts.{e}.up_proj.weight"),
    row("decoder.layers.{2n+1}.experts.down", "model.layers.{n}.mlp.experts.{e}.down_proj.weight"),
)
_MOE: Keys = (("n_experts", "num_experts"), ("top_k", "num_experts_per_tok"), ("moe_ffn", "moe_intermediate_size"),
              ("norm_topk", "norm_topk_prob", False))
_QWEN2 = {"attention_bias": True, "attention_out_bias": False}


def _attention(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The attention letter of each block, and the window where some have one."""
    count, window = layers(content), content.get("sliding_window") if content.get("use_sliding_window") else None
    kinds = content.get("layer_types") or [
        "sliding_attention" if window and i >= content.get("max_window_layers", 28) else "full_attention" for i in range(count)]
    letters = "".join("W" if window and kind == "sliding_attention" else "*" for kind in kinds)
    return letters, {"window": window} if "W" in letters else {}


def _windows(cfg: ModelConfig) -> dict[str, Any]:
    letters = cfg.decoder.pattern[::2]
    return {"use_sliding_window": "W" in letters, "sliding_window": cfg.decoder.window if "W" in letters else None,
            "max_window_layers": letters.find("W") if "W" in letters else len(letters),
            "layer_types": ["sliding_attention" if letter == "W" else "full_attention" for letter in letters]}


def _read_dense(content: Mapping[str, Any], **more: Any) -> ModelConfig:
    refuse_others(content, GATED)
    letters, window = _attention(content)
    return decoder(content, "".join(f"{letter}-" for letter in letters), **window, **more)


def _read_qwen2(content: Mapping[str, Any]) -> ModelConfig:
    return _read_dense(content, **_QWEN2)


def _write_qwen2(cfg: ModelConfig) -> dict[str, Any]:
    return common(cfg, "qwen2") | _windows(cfg)


def _read_qwen3(content: Mapping[str, Any]) -> ModelConfig:
    return _read_dense(content, qk_norm=True, attention_bias=bool(content.get("attention_bias")))


def _write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    return common(cfg, "qwen3") | _windows(cfg) | {"attention_bias": cfg.decoder.attention_bias}


def _read_moe(content: Mapping[str, Any]) -> ModelConfig:
    """Every layer attends within the window, or none does; some MLPs may be dense."""
    refuse_others(content, GATED)
    content = {"num_experts": content.get("num_local_experts"), **content}  # transformers 5 renames it
    window = content.get("sliding_window") if content.get("use_sliding_window") else None
    dense, step = content.get("mlp_only_layers") or [], content.get("decoder_sparse_step", 1)
    pattern = "".join(("W" if window else "*") + ("E" if n not in dense and (n + 1) % step == 0 else "-")
                      for n in range(layers(content)))
    return decoder(content, pattern, qk_norm=True, attention_bias=bool(content.get("attention_bias")), router="softmax", router_bias=False,
                   shared_ffn=0, routed_scaling=1.0, **take(content, _MOE), **({"window": window} if window else {}))


def _write_moe(cfg: ModelConfig) -> dict[str, Any]:
    letters, window = cfg.decoder.pattern[1::2], cfg.decoder.window if "W" in cfg.decoder.pattern else None
    return common(cfg, "qwen3_moe") | give(cfg.decoder, _MOE) | {
        "attention_bias": cfg.decoder.attention_bias, "mlp_only_layers": [n for n, letter in enumerate(letters) if letter == "-"],
        "decoder_sparse_step": 1, "use_sliding_window": window is not None, "sliding_window": window}


QWEN2 = Family("Qwen 2", "qwen2", "Qwen2ForCausalLM", DECODER, ((*ENDS, *ATTENTION, *MLP),), _read_qwen2, _write_qwen2, LEFT_OUT)
QWEN3 = Family("Qwen 3", "qwen3", "Qwen3ForCausalLM", DECODER, ((*ENDS, *ATTENTION, *MLP),), _read_qwen3, _write_qwen3, LEFT_OUT)
QWEN3_MOE = Family("Qwen 3 with experts", "qwen3_moe", "Qwen3MoeForCausalLM", DECODER, ((*ENDS, *ATTENTION, *MLP, *_EXPERTS),),
                   _read_moe, _write_moe, LEFT_OUT)
