"""Tiny language models of other people's classes with every feature on, random weights included."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

VOCAB = 96
_TEXT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
_LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)
_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
_NEMOTRON = dict(
    vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_num_heads=4, mamba_head_dim=16,
    n_groups=2, ssm_state_size=16, conv_kernel=4, chunk_size=8, intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, norm_topk_prob=True, routed_scaling_factor=2.5,
    layer_norm_epsilon=1e-5, max_position_embeddings=256)


@dataclass(frozen=True)
class Case:
    """One configuration of one family: the names of its classes and their arguments."""

    config: str
    model: str
    arguments: dict[str, Any]


CASES = {
    "nemotron_h": Case("NemotronHConfig", "NemotronHForCausalLM", {
        **_NEMOTRON, "hybrid_override_pattern": "M*EM-", "n_group": 2, "topk_group": 1}),
    "nemotron_h all options": Case("NemotronHConfig", "NemotronHForCausalLM", {
        **_NEMOTRON, "hybrid_override_pattern": "ME*-E", "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "moe_latent_size": 20,
        "norm_topk_prob": False, "time_step_min": 0.2, "time_step_max": 0.9}),
    "llama": Case("LlamaConfig", "LlamaForCausalLM", {
        **_TEXT, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama linear": Case("LlamaConfig", "LlamaForCausalLM", {
        **_TEXT, "head_dim": 16, "rope_parameters": dict(rope_type="linear", rope_theta=1e4, factor=3.0), "rms_norm_eps": 1e-5}),
    "mistral": Case("MistralConfig", "MistralForCausalLM", {**_TEXT, "sliding_window": 6, "rope_parameters": _YARN}),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", {k: v for k, v in _TEXT.items() if k != "head_dim"} | {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", {
        **_TEXT, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        "rope_parameters": _YARN}),
    "qwen3_moe": Case("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        **_TEXT, **_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": True,
        "rope_parameters": dict(rope_type="default", rope_theta=1e6)}),
    "qwen3_moe window": Case("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        **_TEXT, **_MOE, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 4, "decoder_sparse_step": 2,
        "tie_word_embeddings": True}),
    "glm": Case("GlmConfig", "GlmForCausalLM", dict(_TEXT)),
    "glm4": Case("Glm4Config", "Glm4ForCausalLM", {**_TEXT, "attention_bias": True}),
}


def make(transformers: ModuleType, name: str, seed: int = 0) -> Any:
    """The owner's model with random weights: no bias is zero, no norm is one, no router is undecided."""
    case = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, case.config)(**case.arguments)
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config)
    randomise(model)
    return model.eval()


def randomise(model: torch.nn.Module) -> None:
    """Moves every parameter and buffer that starts at a constant, and sharpens the matrices so that layers matter."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim < 2:
                p.add_(torch.randn_like(p) * 0.1)
            elif "embed" not in key:
                p.mul_(4)
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(torch.randn_like(b) * 0.1)
            if key.endswith("running_mean"):
                b.normal_(0, 0.1)
            if key.endswith("running_var"):
                b.uniform_(0.5, 1.5)
