"""The benchmark's hybrid decoder and the same model in transformers, with equal weights."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from model import decoder, params
from model.params import Tree

CONFIG = DecoderConfig(
    pattern="MEM*EMEM*E", d_model=512, vocab_size=8192, n_heads=8, n_kv_heads=2, head_dim=64, mamba_heads=16, mamba_head_dim=64,
    mamba_groups=4, mamba_state=64, mamba_chunk=64, n_experts=32, top_k=4, moe_ffn=384, shared_ffn=768, mlp_ffn=768)
THEIR_CHUNK = 128

NAMES = {  # ours -> theirs, within a layer
    "M": {"norm": "norm.weight", "in_proj": "mixer.in_proj.weight", "conv.weight": "mixer.conv1d.weight", "conv.bias": "mixer.conv1d.bias",
          "a_log": "mixer.A_log", "d": "mixer.D", "dt_bias": "mixer.dt_bias", "gate_norm": "mixer.norm.weight",
          "out_proj": "mixer.out_proj.weight"},
    "*": {"norm": "norm.weight", **{f"{name}.weight": f"mixer.{name}_proj.weight" for name in "qkvo"}},
    "E": {"norm": "norm.weight", "router.weight": "mixer.gate.weight", "router.bias": "mixer.gate.e_score_correction_bias",
          "experts.up": "mixer.experts.up_proj", "experts.down": "mixer.experts.down_proj",
          "shared.up": "mixer.shared_experts.up_proj.weight", "shared.down": "mixer.shared_experts.down_proj.weight"},
    "-": {"norm": "norm.weight", "up": "mixer.up_proj.weight", "down": "mixer.down_proj.weight"},
}


def transformers_config(cfg: DecoderConfig) -> Any:
    """NemotronHConfig of the same model, with grouped_mm experts."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, hybrid_override_pattern=cfg.pattern, tie_word_embeddings=cfg.tie_embeddings,
        layer_norm_epsilon=cfg.norm_eps, num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.n_kv_heads, head_dim=cfg.head_dim,
        mamba_num_heads=cfg.mamba_heads, mamba_head_dim=cfg.mamba_head_dim, n_groups=cfg.mamba_groups, ssm_state_size=cfg.mamba_state,
        conv_kernel=cfg.mamba_conv, chunk_size=THEIR_CHUNK, time_step_min=cfg.time_step_min, time_step_max=cfg.time_step_max,
        intermediate_size=cfg.mlp_ffn, mlp_hidden_act="relu2", n_routed_experts=cfg.n_experts, num_experts_per_tok=cfg.top_k,
        moe_intermediate_size=cfg.moe_ffn, n_shared_experts=1, moe_shared_expert_intermediate_size=cfg.shared_ffn, n_group=cfg.n_group,
        topk_group=cfg.topk_group, norm_topk_prob=cfg.norm_topk, routed_scaling_factor=cfg.routed_scaling,
        max_position_embeddings=4096, experts_implementation="grouped_mm")


def their_names(cfg: DecoderConfig) -> dict[str, str]:
    """Our dotted path -> theirs, of every parameter and buffer."""
    names = {"embedding.weight": "model.embeddings.weight", "head.norm": "model.norm_f.weight", "head.weight": "lm_head.weight"}
    for i, kind in enumerate(cfg.pattern):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in NAMES[kind].items()}
    return names


def transformers_model(cfg: DecoderConfig, weights: Tree, dtype: torch.dtype) -> Any:
    """transformers' model with our weights; the router stays in fp32, as from_pretrained keeps it."""
    from transformers import NemotronHForCausalLM

    model = NemotronHForCausalLM(transformers_config(cfg))
    ours = dict(params.named_leaves(weights))
    wanted = {key: t.shape for key, t in model.state_dict().items()}
    names = their_names(cfg)
    model.load_state_dict({theirs: ours[name].reshape(wanted[theirs]) for name, theirs in names.items()}, strict=True)
    model.to(dtype)
    routers = {theirs: ours[name].float().clone() for name, theirs in names.items() if ".router." in name}
    model.load_state_dict(routers, strict=False, assign=True)
    return model


def product_flops(cfg: DecoderConfig) -> int:
    """FLOPs of the products with weights, forward and backward, for one token (attention's and the scan's own products not counted)."""
    sizes = 0
    for name, p in params.named_leaves(decoder.spec(cfg)):
        if p.kind == "param" and len(p.shape) > 1 and not name.startswith("embedding") and "conv" not in name:
            sizes += p.shape[-1] * p.shape[-2] * (cfg.top_k if "experts" in p.axes else 1)
    return 6 * sizes


def fixed_choices(buffers: dict[str, Tensor], ids: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
    """Score corrections [T, E] that leave each token no other choice than ids [T, K]."""
    return buffers | {name: torch.zeros(len(i), cfg.n_experts).scatter_(1, i, 100.0) for name, i in ids.items()}
