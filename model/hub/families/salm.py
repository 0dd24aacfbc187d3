"""NeMo's SALM, as canary-qwen is stored: FastConformer, a linear projection, and a language model whose embedding may stand beside it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from configs.schema import ModelConfig
from model.hub.families.llama import LLAMA
from model.hub.families.nemo import LEFT_OUT, ROWS, read_encoder, write_encoder
from model.hub.families.nemotron_h import NEMOTRON_H
from model.hub.families.qwen import QWEN3, QWEN3_MOE
from model.hub.family import Family, HubError
from model.hub.files import LLM_CONFIG
from model.hub.keys import refuse_others, take
from model.hub.rows import Row, affine, renamed

LANGUAGE_MODELS = {family.model_type: family for family in (QWEN3, QWEN3_MOE, LLAMA, NEMOTRON_H)}
_SPEECH = (*renamed(ROWS, {"": "perception."}), *affine("projector", "perception.proj"))


def _variants(llm: tuple[Row, ...]) -> tuple[tuple[Row, ...], ...]:
    """The embedding inside the language model (SALMAutomodel), moved out (SALM), or only there as the head that it is tied to."""
    inside, embedding = renamed(llm, {"": "llm."}), next(r.theirs[0] for r in llm if r.ours == "decoder.embedding.weight")
    places = (f"llm.{embedding}", "embed_tokens.weight", "llm.lm_head.weight")
    return tuple((*_SPEECH, *renamed(inside, {f"llm.{embedding}": place})) for place in places)


def _read(content: Mapping[str, Any]) -> ModelConfig:
    perception = take(content, [("perception", "perception")])["perception"]
    adapter = perception.get("modality_adapter") or {}
    refuse_others({"modality_adapter": str(adapter.get("_target_", "IdentityConnector")).rpartition(".")[2]},
                  {"modality_adapter": ("IdentityConnector",)})
    llm = content["llm"]
    model = LANGUAGE_MODELS[llm["model_type"]].read(llm)
    refuse_others(perception, {"output_dim": (model.decoder.d_model,)})
    return replace(model, encoder=read_encoder(perception))


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
        adapter = {"_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector"}
        return {"perception": {**write_encoder(cfg.encoder), "modality_adapter": adapter, "output_dim": cfg.decoder.d_model},
                "llm": llm.write(cfg)}

    return write


def _family(llm: Family) -> Family:
    left_out = {**LEFT_OUT, **{rf"llm\.{pattern}": reason for pattern, reason in llm.left_out.items()}}
    return Family(f"SALM with {llm.name}", f"salm/{llm.model_type}", "SALM", ("encoder.", "projector.", "decoder."),
                  _variants(llm.variants[0]), _read, _writer(llm), left_out)


FAMILIES = {kind: _family(llm) for kind, llm in LANGUAGE_MODELS.items()}
