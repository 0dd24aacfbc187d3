"""NeMo's SALM, as canary-qwen is stored: FastConformer, a connector, and a language model whose embedding may stand beside it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from configs.schema import EncoderConfig, ModelConfig, ProjectorConfig, QFormerConfig
from model.hub.families.llama import LLAMA
from model.hub.families.nemo import FIXED, LAYER_KEYS, LEFT_OUT, ROWS, read_encoder, write_encoder
from model.hub.families.nemotron_h import NEMOTRON_H
from model.hub.families.qwen import QWEN3, QWEN3_MOE
from model.hub.family import Family, HubError
from model.hub.files import LLM_CONFIG
from model.hub.keys import Keys, give, refuse_others, take
from model.hub.rows import Row, affine, renamed, row

LANGUAGE_MODELS = {family.model_type: family for family in (QWEN3, QWEN3_MOE, LLAMA, NEMOTRON_H)}
_ADAPTER = "perception.modality_adapter"
_ALONE, _WRAPPED = renamed(ROWS, {"": "perception."}), renamed(ROWS, {"": "perception.encoder_multilayer."})
_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense", "norm": "output.LayerNorm"}
_QFORMER = (
    row("projector.prompts.{n}", f"{_ADAPTER}.layer_prompts.{{n}}"), row("projector.scores", f"{_ADAPTER}.layer_weights"),
    *(r for ours, theirs in (
        *((f"attention.{ours}", f"attention.{theirs}") for ours, theirs in _BERT.items()),
        *((f"cross.{ours}", f"crossattention.{theirs}") for ours, theirs in _BERT.items()),
        ("up", "intermediate.dense"), ("down", "output.dense"), ("norm", "output.LayerNorm"))
      for r in affine(f"projector.layers.{{n}}.{ours}", f"{_ADAPTER}.qformer.layer.{{n}}.{theirs}")),
    *affine("projector.norm", f"{_ADAPTER}.proj.0"), *affine("projector.output", f"{_ADAPTER}.proj.1"))
_CONFORMER = (
    *affine("projector.input", f"{_ADAPTER}.pre_encode"), *affine("projector.output", "perception.proj"),
    *(Row(r.ours.replace("encoder", "projector", 1), tuple(name.replace("encoder", _ADAPTER, 1) for name in r.theirs), r.layout)
      for r in ROWS if r.ours.startswith("encoder.layers")))
_CONNECTORS = ((*_ALONE, *affine("projector", "perception.proj")), (*_ALONE, *_CONFORMER),
               (*_WRAPPED, *affine("projector.several", f"{_ADAPTER}.proj")), (*_WRAPPED, *_QFORMER))
_MODULES = "nemo.collections.speechlm2.modules.perception"
_CONFORMER_FIXED = {**{key: value for key, value in FIXED.items() if key != "subsampling"}, "subsampling_factor": (1,)}
_KINDS = ("IdentityConnector", "ConformerEncoder", "MultiLayerProjectionConnector", "QformerConnector")
_BERT_FFN = 3072  # of BertConfig, which NeMo leaves as it is
_QFORMER_KEYS: Keys = (("queries", "prompt_size"), ("n_layers", "qformer_num_hidden_layers"))


def _variants(llm: tuple[Row, ...]) -> tuple[tuple[Row, ...], ...]:
    """The embedding inside the language model (SALMAutomodel), moved out (SALM), or only there as the head that it is tied to; with each
    connector."""
    inside, embedding = renamed(llm, {"": "llm."}), next(r.theirs[0] for r in llm if r.ours == "decoder.embedding.weight")
    places = (f"llm.{embedding}", "embed_tokens.weight", "llm.lm_head.weight")
    return tuple((*speech, *renamed(inside, {f"llm.{embedding}": place})) for place in places for speech in _CONNECTORS)


def _read(content: Mapping[str, Any]) -> ModelConfig:
    perception = take(content, [("perception", "perception")])["perception"]
    llm = content["llm"]
    model = LANGUAGE_MODELS[llm["model_type"]].read(llm)
    refuse_others(perception, {"output_dim": (model.decoder.d_model,)})
    encoder, adapter = read_encoder(perception), perception.get("modality_adapter") or {}
    return replace(model, encoder=encoder, projector=_read_connector(adapter, encoder, model.decoder.d_model))


def _read_connector(adapter: Mapping[str, Any], encoder: EncoderConfig, width: int) -> ProjectorConfig:
    kind = str(adapter.get("_target_", "IdentityConnector")).rpartition(".")[2]
    if kind == "IdentityConnector":
        return ProjectorConfig()
    if kind == "ConformerEncoder":
        refuse_others(adapter, {**_CONFORMER_FIXED, "feat_in": (encoder.d_model,)})
        return ProjectorConfig(conformer=EncoderConfig(**take(adapter, LAYER_KEYS)))
    refuse_others({"modality_adapter": kind}, {"modality_adapter": _KINDS})
    read = _layers_read(adapter, encoder.n_layers)
    if kind == "MultiLayerProjectionConnector":
        refuse_others(adapter, {"input_dim": (encoder.d_model,), "output_dim": (width,)})
        return ProjectorConfig(encoder_layers=read)
    inner = take(adapter, [("inner", "encoder_config")])["inner"]
    refuse_others(inner, {"d_model": (encoder.d_model,)})
    refuse_others(adapter.get("llm_config") or {}, {"hidden_size": (width,)})
    heads = take(inner, [("n_heads", "encoder_attention_heads")])
    return ProjectorConfig(encoder_layers=read, qformer=QFormerConfig(**take(adapter, _QFORMER_KEYS), **heads, ffn=_BERT_FFN))


def _layers_read(adapter: Mapping[str, Any], n_layers: int) -> list[int]:
    """In order; the encoder's output is that of its last layer, which may be read twice."""
    chosen = take(adapter, [("ids", "target_layer_ids")])["ids"] or range(n_layers)
    read = sorted(i % n_layers for i in chosen) + ([n_layers - 1] if adapter.get("include_final_output", True) else [])
    if read[-1] != n_layers - 1:
        raise HubError(f"config.json has target_layer_ids={adapter['target_layer_ids']} and the encoder {n_layers} layers, of which the "
                       "last is not read; that is not served")
    return read


def _write_connector(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    p, encoder_width, width = cfg.projector, cfg.encoder.d_model, cfg.decoder.d_model
    read = {"target_layer_ids": p.encoder_layers, "include_final_output": False}
    if p.qformer.queries:
        if p.qformer.ffn != _BERT_FFN:
            raise HubError(f"model.projector.qformer.ffn={p.qformer.ffn} and NeMo's Q-Former has {_BERT_FFN}; NeMo cannot have it")
        return {"_target_": f"{_MODULES}.QformerConnector", **read, **give(p.qformer, _QFORMER_KEYS), "llm_config": {"hidden_size": width},
                "encoder_config": {"d_model": encoder_width, "encoder_attention_heads": p.qformer.n_heads}}
    if p.conformer.n_layers:
        return {"_target_": "nemo.collections.asr.modules.ConformerEncoder", "feat_in": encoder_width, **give(p.conformer, LAYER_KEYS),
                **{key: allowed[0] for key, allowed in _CONFORMER_FIXED.items() if allowed}}
    if p.encoder_layers:
        return {"_target_": f"{_MODULES}.MultiLayerProjectionConnector", **read, "input_dim": encoder_width, "output_dim": width}
    return {"_target_": f"{_MODULES}.IdentityConnector", "d_model": encoder_width}  # without d_model NeMo makes no projection


def family(content: Mapping[str, Any]) -> Family:
    """The family that a SALM's configuration belongs to."""
    if "llm" not in content:
        name = take(content, [("name", "pretrained_llm")])["name"]
        raise HubError(f"config.json names the language model {name} without describing it: put its config.json beside as {LLM_CONFIG}")
    refuse_others(content["llm"], {"model_type": tuple(LANGUAGE_MODELS)})
    return FAMILIES[content["llm"]["model_type"]]


def _writer(llm: Family) -> Callable[[ModelConfig], dict[str, Any]]:
    def write(cfg: ModelConfig) -> dict[str, Any]:
        assert cfg.encoder is not None
        return {"perception": {"target": f"{_MODULES}.AudioPerceptionModule", **write_encoder(cfg.encoder),
                               "modality_adapter": _write_connector(cfg), "output_dim": cfg.decoder.d_model},
                "llm": llm.write(cfg)}

    return write


# NeMo takes language model and tokenizer from beside; the class whose embedding stays inside the language model
_ALONE_KEYS = {"model_type": "nemo_speechlm", "architectures": ["NeMoSpeechLMForConditionalGeneration"], "use_nemo_automodel": True,
               "pretrained_llm": "llm_backbone", "pretrained_weights": False, "audio_locator_tag": "<|audio|>", "prompt_format": "plain",
               "freeze_params": [], "prevent_freeze_params": []}


def _family(llm: Family) -> Family:
    left_out = {**LEFT_OUT, **{rf"llm\.{pattern}": reason for pattern, reason in llm.left_out.items()}}
    return Family(f"SALM with {llm.name}", f"salm/{llm.model_type}", "SALM", ("encoder.", "projector.", "decoder."),
                  _variants(llm.variants[0]), _read, _writer(llm), left_out, alone=_ALONE_KEYS, one_file=True)


FAMILIES = {kind: _family(llm) for kind, llm in LANGUAGE_MODELS.items()}
