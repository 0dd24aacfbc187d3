"""Adapters against peft on the owner's model: written there and opened here, written here and opened there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config, LoraConfig
from model import lora, params, speech_lm
from model.hub.adapter import CONFIG, WEIGHTS, load_adapter, read_settings, save_adapter, targets
from model.hub.family import HubError
from model.hub.load import Loaded
from tests.parity.adapters import CASES, base, from_peft, to_peft, whole

pytestmark = pytest.mark.parity
ATTENTION = r".*\.[qkvo]\.weight"


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft(transformers: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    opened = from_peft(transformers, name, tmp_path)
    spec = speech_lm.spec(Config(model=opened.cfg))
    assert {n: p.shape for n, p in params.named_leaves(spec)} == {n: t.shape for n, t in opened.tensors.items()}
    assert opened.error <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_for_peft(transformers: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    written = to_peft(transformers, name, tmp_path)
    assert written.error <= 1e-5
    assert written.merged_error <= 1e-5
    family = written.base.family
    again = dataclasses.replace(written.base.cfg, lora=read_settings(tmp_path / "adapter", family, written.base.cfg))
    assert {t.path for t in targets(family, again)} == {t.path for t in targets(family, written.cfg)}
    for path, tensor in load_adapter(tmp_path / "adapter", written.tensors, family, again).items():
        torch.testing.assert_close(tensor, written.tensors[path], rtol=1e-5, atol=1e-6, msg=path)


@pytest.fixture
def saved(transformers: Any, tmp_path: Path) -> tuple[Path, Loaded]:
    _, loaded = base(transformers, "glm rslora", tmp_path / "base")
    cfg, tensors = dataclasses.replace(loaded.cfg, lora=LoraConfig(rank=2, targets=[ATTENTION])), whole(loaded)
    spec = dict(params.named_leaves(speech_lm.spec(Config(model=cfg))))
    save_adapter(tmp_path, tensors | {path: torch.randn(p.shape) for path, p in spec.items() if lora.SUFFIX in path}, loaded.family, cfg)
    return tmp_path, loaded


@pytest.mark.parametrize("change, message", [
    ({"bias": "all"}, r"asks for \{'bias': 'all'\}, which has no counterpart"),
    ({"alpha_pattern": {"q_proj": 3}}, "asks for .*alpha_pattern"),
    ({"peft_type": "IA3"}, "asks for .*IA3"),
    ({"modules_to_save": ["lm_head"]}, "asks for .*modules_to_save"),
    *(({"init_lora_weights": init}, f"asks for .*'init_lora_weights': '{init}'") for init in ("pissa_niter_16", "olora", "corda", "loftq")),
])
def test_other_formulas_are_refused(saved: tuple[Path, Loaded], change: dict[str, Any], message: str) -> None:
    folder, loaded = saved
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | change))
    with pytest.raises(HubError, match=message):
        read_settings(folder, loaded.family, loaded.cfg)


def test_tensors_without_a_place_or_without_their_half_are_named(saved: tuple[Path, Loaded]) -> None:
    folder, loaded = saved
    stored = load_file(folder / WEIGHTS)
    cfg = dataclasses.replace(loaded.cfg, lora=read_settings(folder, loaded.family, loaded.cfg))
    save_file({**stored, "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    with pytest.raises(HubError, match=r"no place in .*: base_model\.model\.lm_head\.lora_A\.weight"):
        load_adapter(folder, {}, loaded.family, cfg)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({name: t for name, t in stored.items() if name != key}, folder / WEIGHTS)
    with pytest.raises(HubError, match=r"lacks .*q_proj"):
        load_adapter(folder, {}, loaded.family, cfg)
    save_file({"x.lora_A.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    with pytest.raises(HubError, match="adapts no projection of GLM"):
        read_settings(folder, loaded.family, loaded.cfg)
    with pytest.raises(HubError, match="none does not exist; give a folder that peft has saved"):
        read_settings(folder / "none", loaded.family, loaded.cfg)
