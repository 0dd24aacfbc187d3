"""Adapters against peft on the owner's model, in both directions."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import CompileConfig, Config, LoraConfig, ModelConfig
from model import decoder, lora, params, speech_lm
from model.hub.adapter import load_adapter, read_settings, save_adapter
from model.hub.load import Loaded, load
from parallel.gather import Reshard
from tests.dist.first import worst
from tests.model.token_rows import token_row
from tests.parity import owners
from tests.parity.results import relative_error, single_mesh
from training.engine import Engine, Pass

TOKENS = torch.arange(3, 40)
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


@dataclasses.dataclass(frozen=True)
class Adapted:
    """An adapter on a model of ours, and how far logits are from peft's: the largest difference over the largest logit."""

    base: Loaded
    cfg: ModelConfig  # of the model with its adapter
    tensors: dict[str, Tensor]
    error: float  # with the adapter beside its matrices
    merged_error: float = 0.0  # and as a part of them


def error(cfg: ModelConfig, tensors: dict[str, Tensor], theirs: Tensor, frozen: Tensor) -> float:
    """Of our logits; `frozen` are those without the adapter, which must matter."""
    assert relative_error(frozen, theirs) > 1e-2
    return relative_error(logits(cfg, tensors), theirs)


def from_peft(transformers: Any, name: str, folder: Path) -> Adapted:
    """Written by peft, opened here."""
    import peft

    model, loaded = base(transformers, name, folder / "base")
    frozen = model(TOKENS[None]).logits[0].detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **CASES[name][1]))
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_magnitude" in key:
                p.mul_(1 + 0.3 * torch.rand_like(p))
            elif "lora_B" in key:
                p.copy_(0.3 * torch.randn_like(p))
    adapted.save_pretrained(folder / "adapter")
    cfg = dataclasses.replace(loaded.cfg, lora=read_settings(folder / "adapter", loaded.family, loaded.cfg))
    tensors = whole(loaded)
    tensors |= load_adapter(folder / "adapter", tensors, loaded.family, cfg)
    return Adapted(loaded, cfg, tensors, error(cfg, tensors, adapted(TOKENS[None]).logits[0].detach(), frozen))


def to_peft(transformers: Any, name: str, folder: Path) -> Adapted:
    """Written here, opened by peft."""
    import peft

    model, loaded = base(transformers, name, folder / "base")
    frozen = model(TOKENS[None]).logits[0].detach()
    cfg, tensors = dataclasses.replace(loaded.cfg, lora=CASES[name][2]), whole(loaded)
    spec = dict(params.named_leaves(speech_lm.spec(Config(model=cfg))))
    torch.manual_seed(1)
    tensors |= {path: 0.3 * torch.randn(p.shape) for path, p in spec.items() if lora.SUFFIX in path}
    save_adapter(folder / "adapter", tensors, loaded.family, cfg, base=str(folder / "base"))
    theirs = peft.PeftModel.from_pretrained(model, str(folder / "adapter"))(TOKENS[None]).logits[0].detach()
    merged = {path: lora.merge(path, tensors.__getitem__, tensors, cfg.lora) for path in loaded.tensors}
    plain = dataclasses.replace(cfg, lora=LoraConfig())
    return Adapted(loaded, cfg, tensors, error(cfg, tensors, theirs, frozen), error(plain, merged, theirs, frozen))


def worst_error(transformers: Any, name: str, folder: Path) -> float:
    """Of both directions, merged included."""
    written = to_peft(transformers, name, folder / "to")
    return worst([from_peft(transformers, name, folder / "from").error, written.error, written.merged_error])
