"""NeMo's FastConformer out of a speech recogniser (canary, parakeet); its parameters have the names that ours have."""

from collections.abc import Mapping
from typing import Any

from configs.schema import EncoderConfig, ModelConfig
from model.hub.family import Family
from model.hub.keys import Fixed, Keys, give, refuse_others, take
from model.hub.rows import affine, row

_MODULES = "nemo.collections.asr.modules"
CONVOLUTIONS = (0, 2, 3, 5, 6)  # of the subsampling, numbered with the functions between them
NORMS = ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out")
_AFFINE = (*(f"{ff}.{linear}" for ff in ("feed_forward1", "feed_forward2") for linear in ("linear1", "linear2")),
           *(f"self_attn.linear_{x}" for x in ("q", "k", "v", "out", "pos")),
           "conv.pointwise_conv1", "conv.depthwise_conv", "conv.pointwise_conv2", "conv.batch_norm")
_OTHERS = ("self_attn.pos_bias_u", "self_attn.pos_bias_v", "conv.batch_norm.running_mean", "conv.batch_norm.running_var")
ROWS = (
    *(r for name in (*(f"conv.{i}" for i in CONVOLUTIONS), "out")
      for r in affine(f"encoder.subsampling.{name}", f"encoder.pre_encode.{name}")),
    *(r for name in (*NORMS, *_AFFINE) for r in affine(f"encoder.layers.{{n}}.{name}", f"encoder.layers.{{n}}.{name}")),
    *(row(f"encoder.layers.{{n}}.{name}", f"encoder.layers.{{n}}.{name}") for name in _OTHERS),
)
NO_COUNTER = {r".*\.num_batches_tracked": "the momentum of the running statistics is a constant"}
LEFT_OUT = {
    r"(perception\.)?preprocessor\.featurizer\.(window|fb)": "the front end computes its window and filters, in fp32",
    **NO_COUNTER,
}
LAYER_KEYS: Keys = (
    ("d_model", "d_model"), ("n_layers", "n_layers"), ("n_heads", "n_heads", 4), ("ff_expansion", "ff_expansion_factor", 4),
    ("conv_kernel", "conv_kernel_size", 31), ("conv_norm", "conv_norm_type", "batch_norm"), ("bias", "use_bias", True),
    ("xscaling", "xscaling", True))
_KEYS: Keys = (("mel_bins", "feat_in"), *LAYER_KEYS, ("subsampling_channels", "subsampling_conv_channels"))
FIXED: Fixed = {"subsampling": ("dw_striding",), "subsampling_factor": (8,), "self_attention_model": ("rel_pos",), "feat_out": (-1,),
                "att_context_size": ([-1, -1], [[-1, -1]]), "causal_downsampling": (False,), "untie_biases": (True,), "reduction": ()}
_FRONT_END: Fixed = {"sample_rate": (16000,), "window_size": (0.025,), "window_stride": (0.01,), "window": ("hann",), "n_fft": (512,),
                     "log": (True,), "normalize": ("per_feature",), "frame_splicing": (1,)}


def read_encoder(content: Mapping[str, Any]) -> EncoderConfig:
    """The encoder that the sections `encoder` and `preprocessor` describe."""
    parts = take(content, [("encoder", "encoder"), ("front_end", "preprocessor")])
    refuse_others(parts["encoder"], FIXED)
    refuse_others(parts["front_end"], _FRONT_END)
    return EncoderConfig(kind="fastconformer", **take(parts["encoder"], _KEYS))


def write_encoder(cfg: EncoderConfig) -> dict[str, Any]:
    """The two sections."""
    return {"encoder": {"_target_": f"{_MODULES}.ConformerEncoder", **give(cfg, _KEYS),
                        **{key: allowed[0] for key, allowed in FIXED.items() if allowed}},
            "preprocessor": {"_target_": f"{_MODULES}.AudioToMelSpectrogramPreprocessor", "features": cfg.mel_bins, "pad_to": 0,
                             **{key: allowed[0] for key, allowed in _FRONT_END.items()}}}


def _read(content: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(encoder=read_encoder(content))


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    return write_encoder(cfg.encoder)


NEMO = Family("NeMo FastConformer", "nemo", "ConformerEncoder", ("encoder.",), (ROWS,), _read, _write,
              {**LEFT_OUT, r"(?!encoder\.|preprocessor\.).*": "only the encoder of a recogniser is taken"})
