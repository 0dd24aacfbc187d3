"""FastConformer encoders of NVIDIA's parakeet models as transformers stores them."""

from collections.abc import Mapping
from typing import Any

from configs.schema import EncoderConfig, ModelConfig
from model.hub.families.nemo import CONVOLUTIONS, NO_COUNTER, NORMS
from model.hub.family import Family
from model.hub.keys import Fixed, Keys, expansion, give, refuse_others, take
from model.hub.rows import Row, affine, renamed, row

_AFFINE = {
    **{name: name for name in NORMS},
    **{f"{ff}.{linear}": f"{ff}.{linear}" for ff in ("feed_forward1", "feed_forward2") for linear in ("linear1", "linear2")},
    **{f"self_attn.linear_{ours}": f"self_attn.{theirs}" for ours, theirs in (
        ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj"), ("pos", "relative_k_proj"))},
    **{f"conv.{name}": f"conv.{name}" for name in ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")}, "conv.batch_norm": "conv.norm"}
_OTHERS = {"self_attn.pos_bias_u": "self_attn.bias_u", "self_attn.pos_bias_v": "self_attn.bias_v",
           "conv.batch_norm.running_mean": "conv.norm.running_mean", "conv.batch_norm.running_var": "conv.norm.running_var"}
_ROWS: tuple[Row, ...] = (
    *(r for i in CONVOLUTIONS for r in affine(f"encoder.subsampling.conv.{i}", f"subsampling.layers.{i}")),
    *affine("encoder.subsampling.out", "subsampling.linear"),
    *(r for ours, theirs in _AFFINE.items() for r in affine(f"encoder.layers.{{n}}.{ours}", f"layers.{{n}}.{theirs}")),
    *(row(f"encoder.layers.{{n}}.{ours}", f"layers.{{n}}.{theirs}") for ours, theirs in _OTHERS.items()),
)
_KEYS: Keys = (("mel_bins", "num_mel_bins", 80), ("d_model", "hidden_size"), ("n_layers", "num_hidden_layers"),
               ("n_heads", "num_attention_heads"), ("conv_kernel", "conv_kernel_size", 9), ("bias", "attention_bias", True),
               ("subsampling_channels", "subsampling_conv_channels", 256), ("xscaling", "scale_input", True))
_FIXED: Fixed = {"hidden_act": ("silu",), "subsampling_factor": (8,), "subsampling_conv_kernel_size": (3,), "subsampling_conv_stride": (2,)}
LEFT_OUT = {**NO_COUNTER,
            r"(ctc_head|decoder|joint|encoder_projector|decoder_projector)\..*": "only the encoder of a recogniser is taken"}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    content = content.get("encoder_config") or content
    refuse_others(content, _FIXED)
    refuse_others(content, {"convolution_bias": (content.get("attention_bias", True),)})
    encoder = take(content, _KEYS)
    return ModelConfig(encoder=EncoderConfig(kind="fastconformer", ff_expansion=expansion(content, "intermediate_size", "hidden_size", 4),
                                             **encoder))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return {"model_type": "parakeet_encoder", "intermediate_size": cfg.encoder.ff_expansion * cfg.encoder.d_model,
            "convolution_bias": cfg.encoder.bias, **give(cfg.encoder, _KEYS)}


_INSIDE = renamed(_ROWS, {"": "encoder."})
PARAKEET = Family("Parakeet encoder", "parakeet_encoder", "ParakeetEncoder", ("encoder.",), (_ROWS, _INSIDE), _read, _write, LEFT_OUT)
PARAKEET_CTC = Family("Parakeet CTC encoder", "parakeet_ctc", "ParakeetForCTC", ("encoder.",), (_INSIDE, _ROWS), _read, _write, LEFT_OUT)
