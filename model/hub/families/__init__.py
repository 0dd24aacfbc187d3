"""The families of published models that can be loaded and exported."""

from collections.abc import Mapping
from typing import Any

from model.hub.families import glm, glm_asr, llama, nemo, nemotron_h, parakeet, qwen, salm, whisper
from model.hub.family import Family, HubError

FAMILIES: dict[str, Family] = {family.model_type: family for family in (
    nemotron_h.NEMOTRON_H, llama.LLAMA, llama.MISTRAL, qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE, glm.GLM, glm.GLM4,
    glm_asr.GLM_ASR, whisper.WHISPER, nemo.NEMO,
    parakeet.PARAKEET, parakeet.PARAKEET_CTC, *salm.FAMILIES.values())}


def family_of(content: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to."""
    if "perception" in content:
        return salm.family(content)
    if "encoder" in content and "preprocessor" in content:
        return nemo.NEMO
    kind = content.get("model_type")
    if kind not in FAMILIES:
        raise HubError(f"config.json has model_type {kind!r}; served are {', '.join(FAMILIES)}")
    return FAMILIES[kind]
