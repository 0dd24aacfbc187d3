"""GLM-4: rotary pairs lie side by side in half of each head, gate and up are one matrix; GLM-4-0414 also normalises what a layer adds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.schema import ModelConfig
from model.hub.families.llama import ATTENTION, DECODER, ENDS, GATED, common, decoder
from model.hub.family import Family
from model.hub.keys import layers, refuse_others
from model.hub.rows import row

_BLOCK = (
    *(replace(r, layout="pairs") if ".q." in r.ours or ".k." in r.ours else r for r in ATTENTION),
    row("decoder.layers.{2n+1}.norm", "model.layers.{n}.post_attention_layernorm.weight"),
    row("decoder.layers.{2n+1}.up", "model.layers.{n}.mlp.gate_up_proj.weight"),
    row("decoder.layers.{2n+1}.down", "model.layers.{n}.mlp.down_proj.weight"),
    row("decoder.layers.{2n}.post_norm", "model.layers.{n}.post_self_attn_layernorm.weight"),
    row("decoder.layers.{2n+1}.post_norm", "model.layers.{n}.post_mlp_layernorm.weight"),
)


def _reader(post_norm: bool) -> Any:
    def read(content: Mapping[str, Any]) -> ModelConfig:
        refuse_others(content, GATED)
        return decoder(content, "*-" * layers(content), fraction=0.5, attention_out_bias=False, post_norm=post_norm,
                       attention_bias=bool(content.get("attention_bias", not post_norm)))

    return read


def _writer(model_type: str) -> Any:
    def write(cfg: ModelConfig) -> dict[str, Any]:
        return common(cfg, model_type) | {"attention_bias": cfg.decoder.attention_bias}

    return write


GLM = Family("GLM-4", "glm", "GlmForCausalLM", DECODER, ((*ENDS, *_BLOCK),), _reader(False), _writer("glm"))
GLM4 = Family("GLM-4-0414", "glm4", "Glm4ForCausalLM", DECODER, ((*ENDS, *_BLOCK),), _reader(True), _writer("glm4"))
