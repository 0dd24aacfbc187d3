"""FastConformer encoders of NVIDIA's parakeet models as transformers stores them."""

from collections.abc import Mapping
from typing import Any

from configs.schema import EncoderConfig, ModelConfig
from model.hub.family import Family, HubError
from model.hub.keys import Fixed, Keys, give, refuse_others, take
from model.hub.rows import Row, renamed, row

_PARTS = ("weight", "bias")
_NORMS = ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out")
_AFFINE = {
    **{f"{ff}.{linear}": f"{ff}.{linear}" for ff in ("feed_forward1", "feed_forward2") for linear in ("linear1", "linear2")},
    **{f"self_attn.linear_{ours}": f"self_attn.{theirs}" for ours, theirs in (
        ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj"), ("pos", "relative_k_proj"))},
    **{f"conv.{name}": f"conv.{name}" for name in ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")}, "conv.batch_norm": "conv.norm"}
_OTHERS = {"self_attn.pos_bias_u": "self_attn.bias_u", "self_attn.pos_bias_v": "self_attn.bias_v",
           "conv.batch_norm.running_mean": "conv.norm.running_mean", "conv.batch_norm.running_var": "conv.norm.running_var"}
_ROWS: tuple[Row, ...] = (
    *(row(f"encoder.subsampling.conv.{i}.{part}", f"subsampling.layers.{i}.{part}") for i in (0, 2, 3, 5, 6) for part in _PARTS),
    *(row(f"encoder.subsampling.out.{part}", f"subsampling.linear.{part}") for part in _PARTS),
    *(row(f"encoder.layers.{{n}}.{name}.{part}", f"layers.{{n}}.{name}.{part}") for name in _NORMS for part in _PARTS),
    *(row(f"encoder.layers.{{n}}.{ours}.{part}", f"layers.{{n}}.{theirs}.{part}") for ours, theirs in _AFFINE.items() for part in _PARTS),
    *(row(f"encoder.layers.{{n}}.{ours}", f"layers.{{n}}.{theirs}") for ours, theirs in _OTHERS.items()),
)
_KEYS: Keys = (("mel_bins", "num_mel_bins", 80), ("d_model", "hidden_size"), ("n_layers", "num_hidden_layers"),
               ("n_heads", "num_attention_heads"), ("conv_kernel", "conv_kernel_size", 9), ("bias", "attention_bias", True),
               ("subsampling_channels", "subsampling_conv_channels", 256), ("xscaling", "scale_input", True))
_FIXED: Fixed = {"hidden_act": ("silu",), "subsampling_factor": (8,), "subsampling_conv_kernel_size": (3,), "subsampling_conv_stride": (2,)}
LEFT_OUT = {r".*\.num_batches_tracked": "the momentum of the running statistics is a constant",
            r"(ctc_head|decoder|joint|encoder_projector|decoder_projector)\..*": "only the encoder of a recogniser is taken"}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    content = content.get("encoder_config") or content
    refuse_others(content, _FIXED)
    refuse_others(content, {"convolution_bias": (content.get("attention_bias", True),)})
    encoder = EncoderConfig(kind="fastconformer", **take(content, _KEYS))
    ffn = take(content, [("ffn", "intermediate_size", 4 * encoder.d_model)])["ffn"]
    if ffn % encoder.d_model:
        raise HubError(f"config.json has intermediate_size={ffn}, which is no multiple of hidden_size={encoder.d_model}")
    encoder.ff_expansion = ffn // encoder.d_model
    return ModelConfig(encoder=encoder)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return {"model_type": "parakeet_encoder", "intermediate_size": cfg.encoder.ff_expansion * cfg.encoder.d_model,
            "convolution_bias": cfg.encoder.bias, **give(cfg.encoder, _KEYS)}


_INSIDE = renamed(_ROWS, {"": "encoder."})
PARAKEET = Family("Parakeet encoder", "parakeet_encoder", "ParakeetEncoder", ("encoder.",), (_ROWS, _INSIDE), _read, _write, LEFT_OUT)
PARAKEET_CTC = Family("Parakeet CTC encoder", "parakeet_ctc", "ParakeetForCTC", ("encoder.",), (_INSIDE, _ROWS), _read, _write, LEFT_OUT)
