"""Adapters against peft on the owner's model: written there and opened here, written here and opened there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema import CompileConfig, Config, LoraConfig, ModelConfig
from model import decoder, lora, params, speech_lm
from model.hub.adapter import CONFIG, WEIGHTS, load_adapter, read_settings, save_adapter, targets
from model.hub.family import HubError
from model.hub.load import Loaded, load
from parallel.gather import Reshard
from tests.model.token_rows import token_row
from tests.parity import owners
from tests.parity.check import single_mesh
from training.engine import Engine, Pass

pytestmark = pytest.mark.parity
TOKENS = torch.arange(3, 40)
ATTENTION = r".*\.[qkvo]\.weight"
CASES: dict[str, tuple[str, dict[str, Any], LoraConfig]] = {  # owner's model; peft's settings; ours
    "qwen3 dora": ("qwen3", dict(target_modules=["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], use_dora=True),
                   LoraConfig(rank=4, alpha=6, dora=True, targets=[r".*\.[qo]\.weight", ".*up$", ".*down$"], ranks={".*up$": 3})),
    "half of a joined matrix": ("llama linear", dict(target_modules=["up_proj"]), LoraConfig(rank=4, targets=[".*up$"])),
    "glm rslora": ("glm", dict(target_modules=["q_proj", "k_proj", "gate_up_proj"], use_rslora=True),
                   LoraConfig(rank=4, alpha=3, rslora=True, targets=[r".*\.[qk]\.weight", ".*up$"])),
    "nemotron": ("nemotron_h", dict(target_modules=["in_proj", "q_proj", "shared_experts.up_proj"],
                                    target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj"]),
                 LoraConfig(rank=4, alpha=8)),
    "qwen3_moe experts": ("qwen3_moe", dict(target_modules=["v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
                          LoraConfig(rank=4, targets=[r".*experts\.", r".*\.v\."])),
    "one of two": ("qwen3_moe", dict(target_modules=[], target_parameters=["experts.down_proj"]),
                   LoraConfig(rank=4, targets=[r".*experts\.down"])),
}


def base(transformers: Any, name: str, folder: Path) -> tuple[Any, Loaded]:
    model = owners.make(transformers, CASES[name][0])
    model.save_pretrained(folder)
    return model, load(folder, single_mesh())


def whole(loaded: Loaded) -> dict[str, Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in loaded.tensors.items()}


def logits(cfg: ModelConfig, tensors: dict[str, Tensor]) -> Tensor:
    """Of TOKENS, with the adapters beside their matrices."""
    config = Config(model=cfg)
    engine = Engine(speech_lm.spec(config), speech_lm.units(config), single_mesh(), torch.float32, Reshard(), CompileConfig(enabled=False),
                    lora.binder(cfg.lora))
    ctx = token_row(cfg.decoder, [len(TOKENS)])
    run = Pass(engine, tensors, ctx)
    x_TD = speech_lm.layers(run, speech_lm.embed(run, None, {"tokens_T": TOKENS}, ctx), ctx, {})
    return run(speech_lm.head_unit(cfg), decoder.logits, x_TD, torch.arange(len(TOKENS)))


def assert_equal(ours: Tensor, theirs: Tensor, frozen: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (theirs - frozen).abs().max() > 1e-2 * theirs.abs().max()  # the adapter matters


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft(transformers: Any, name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, loaded = base(transformers, name, tmp_path / "base")
    frozen = model(TOKENS[None]).logits[0].detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **CASES[name][1]))
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_magnitude" in key:
                p.mul_(1 + 0.3 * torch.rand_like(p))
            elif "lora_B" in key:
                p.copy_(0.3 * torch.randn_like(p))
    adapted.save_pretrained(tmp_path / "adapter")
    settings = read_settings(tmp_path / "adapter", loaded.family, loaded.cfg)
    cfg = dataclasses.replace(loaded.cfg, lora=settings)
    tensors = whole(loaded)
    tensors |= load_adapter(tmp_path / "adapter", tensors, loaded.family, cfg)
    assert {n: p.shape for n, p in params.named_leaves(speech_lm.spec(Config(model=cfg)))} == {n: t.shape for n, t in tensors.items()}
    assert_equal(logits(cfg, tensors), adapted(TOKENS[None]).logits[0].detach(), frozen)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_for_peft(transformers: Any, name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, loaded = base(transformers, name, tmp_path / "base")
    frozen = model(TOKENS[None]).logits[0].detach()
    cfg, tensors = dataclasses.replace(loaded.cfg, lora=CASES[name][2]), whole(loaded)
    spec = dict(params.named_leaves(speech_lm.spec(Config(model=cfg))))
    torch.manual_seed(1)
    tensors |= {path: 0.3 * torch.randn(p.shape) for path, p in spec.items() if lora.SUFFIX in path}
    save_adapter(tmp_path / "adapter", tensors, loaded.family, cfg, base=str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    theirs = adapted(TOKENS[None]).logits[0].detach()
    assert_equal(logits(cfg, tensors), theirs, frozen)
    merged = {path: lora.merge(path, tensors.__getitem__, tensors, cfg.lora) for path in loaded.tensors}
    plain = dataclasses.replace(cfg, lora=LoraConfig())
    assert_equal(logits(plain, merged), theirs, frozen)
    settings = read_settings(tmp_path / "adapter", loaded.family, loaded.cfg)
    again = dataclasses.replace(loaded.cfg, lora=settings)
    assert {t.path for t in targets(loaded.family, again)} == {t.path for t in targets(loaded.family, cfg)}
    for path, tensor in load_adapter(tmp_path / "adapter", tensors, loaded.family, again).items():
        torch.testing.assert_close(tensor, tensors[path], rtol=1e-5, atol=1e-6, msg=path)


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
    with pytest.raises(HubError, match="cannot be read"):
        read_settings(folder / "none", loaded.family, loaded.cfg)
