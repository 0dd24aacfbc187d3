"""Adapters as folders that peft writes and reads, adapter_config.json and adapter_model.safetensors, under a family's names."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema import LoraConfig, ModelConfig
from model import lora
from model.hub.family import Entry, Family, HubError, layouts
from model.hub.rows import Block
from model.params import P, chosen

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# peft's settings that change the formula, and the value under which it is ours
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "lora_bias": False, "fan_in_fan_out": False, "modules_to_save": None, "layer_replication": None,
    "alora_invocation_tokens": None, "trainable_token_indices": None, "use_qalora": False, "use_bdlora": None, "alpha_pattern": {}}
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # the others move the frozen matrices too


@dataclass(frozen=True)
class Target:
    """An adapted projection of ours and the foreign modules that hold it.

    Routed experts are one foreign parameter; then `module` is [the module of all experts] and `parameter` the parameter's name there.
    """

    path: str
    p: P
    modules: tuple[str, ...]
    blocks: tuple[Block, ...]
    parameter: str | None = None

    def adapter(self, part: str) -> str:
        """Our path of a, b or magnitude."""
        return f"{self.path}{lora.SUFFIX}.{part}"


def targets(family: Family, cfg: ModelConfig) -> list[Target]:
    """The projections that cfg.lora adapts, under the names that the owner's model has in memory (a family's last variant)."""
    found = (entry for entry in layouts(family, cfg)[-1] if lora.adaptable(entry.p))
    return [_target(entry) for entry in found if chosen(entry.path, cfg.lora.targets)]


def _target(entry: Entry) -> Target:
    names = [block.name.removesuffix(".weight") for block in entry.blocks]
    if len(entry.p.shape) == 2:
        return Target(entry.path, entry.p, tuple(names), entry.blocks)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    parameter = kinds[0] if len(kinds) == 1 else "_".join(kind.removesuffix("_proj") for kind in kinds) + "_proj"
    return Target(entry.path, entry.p, (names[0].rpartition(".")[0].rpartition(".")[0],), entry.blocks, parameter)


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], family: Family, cfg: ModelConfig, base: str | None = None) -> None:
    """Write the adapters among the whole `tensors`, by dotted path, for peft.

    :param tensors: with the adapted matrices themselves for DoRA, of which peft stores the length of each row
    :param base: name or folder of the frozen model, for whoever reads the file
    """
    out: dict[str, Tensor] = {}
    found = targets(family, cfg)
    for target in found:
        a, b = (tensors[target.adapter(name)].detach().float() for name in "ab")
        if target.parameter is not None:
            out |= _named(_stacked_key(target, found), a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
            continue
        for module, block in zip(target.modules, target.blocks, strict=True):
            out |= _named(_PREFIX + module, a, _theirs(b, block))
            if cfg.lora.dora:
                length = lora.row_lengths(tensors[target.path].detach()) * (1 + tensors[target.adapter("magnitude")].detach())
                out[f"{_PREFIX}{module}.lora_magnitude_vector"] = _theirs(length, block)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in out.items()}, folder / WEIGHTS)  # no two share memory
    (folder / CONFIG).write_text(json.dumps(_config(found, cfg.lora, base), indent=2) + "\n")


def _config(found: list[Target], cfg: LoraConfig, base: str | None) -> dict[str, Any]:
    modules = [module for t in found if t.parameter is None for module in t.modules]
    ranks = {module: lora.rank_of(t.path, cfg) for t in found for module in t.modules if lora.rank_of(t.path, cfg) != cfg.rank}
    return {"peft_type": "LORA", "base_model_name_or_path": base, "r": cfg.rank, "lora_alpha": cfg.alpha, "lora_dropout": cfg.dropout,
            "use_rslora": cfg.rslora, "use_dora": cfg.dora, "target_modules": modules,
            "target_parameters": [f"{t.modules[0]}.{t.parameter}" for t in found if t.parameter] or None,
            "rank_pattern": ranks, "bias": "none", "inference_mode": True}


def _named(key: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}


def _stacked_key(target: Target, found: list[Target]) -> str:
    """peft wraps a module once for each of its adapted parameters, the first innermost."""
    beside = [t.path for t in found if t.modules == target.modules and t.parameter]
    return _PREFIX + target.modules[0] + ".base_layer" * (len(beside) - 1 - beside.index(target.path))


def _theirs(rows: Tensor, block: Block) -> Tensor:
    """The foreign projection's part of what we have a row of for each of our output rows."""
    box = rows[block.start[0] : block.start[0] + block.size[0]]
    return box if block.permutation is None else torch.empty_like(box).index_copy_(0, block.permutation, box)


def _ours(rows: Tensor, block: Block) -> Tensor:
    return rows if block.permutation is None else rows[block.permutation]


def read_settings(folder: Path, family: Family, cfg: ModelConfig) -> LoraConfig:
    """The configuration under which `cfg` has the adapters of a folder; raises HubError for settings that mean another formula."""
    lost = [folder, *(folder / name for name in (CONFIG, WEIGHTS))]
    if absent := next((path for path in lost if not path.exists()), None):
        raise HubError(f"{absent} does not exist; give a folder that peft has saved")
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise HubError(f"{folder / CONFIG} cannot be read ({error}); give a folder that peft has saved") from error
    other = {key: content[key] for key, plain in _PLAIN.items() if content.get(key) not in (None, plain)}
    if content.get("init_lora_weights") not in _INITS:
        other["init_lora_weights"] = content["init_lora_weights"]
    if other:
        raise HubError(f"{folder / CONFIG} asks for {other}, which has no counterpart here; train the adapter without it")
    plain = LoraConfig(rank=content["r"], alpha=content["lora_alpha"], rslora=bool(content.get("use_rslora")),
                       dora=bool(content.get("use_dora")), dropout=content.get("lora_dropout") or 0.0, targets=["decoder"])
    stored = load_file(folder / WEIGHTS)
    parameters = content.get("target_parameters") or []
    used = [t for t in targets(family, replace(cfg, lora=plain)) if _is_used(t, stored, parameters)]
    if not used:
        raise HubError(f"{folder / WEIGHTS} adapts no projection of {family.name}; its tensors are like {min(stored)}")
    ranks = {t.path: len(torch.cat(_inner(t, stored))) for t in used if t.parameter is None}
    return replace(plain, targets=[re.escape(t.path) + "$" for t in used],
                   ranks={re.escape(path) + "$": rank for path, rank in ranks.items() if rank != plain.rank})


def _is_used(target: Target, stored: Mapping[str, Tensor], parameters: list[str]) -> bool:
    if target.parameter is not None:
        return any(f".{target.modules[0]}.{target.parameter}".endswith("." + name) for name in parameters)
    return any(f"{_PREFIX}{module}.lora_A.weight" in stored for module in target.modules)


def load_adapter(folder: Path, weights: Mapping[str, Tensor], family: Family, cfg: ModelConfig) -> dict[str, Tensor]:
    """The adapters of a folder as whole tensors by dotted path, for a model that was built with cfg.lora = read_settings(...).

    :param weights: the adapted matrices, whole, by dotted path; read for DoRA alone
    :raises HubError: with every tensor that has no place here
    """
    stored = load_file(folder / WEIGHTS)
    found, left = targets(family, cfg), set(stored)
    out: dict[str, Tensor] = {}
    for target in found:
        try:
            out |= dict(_read_target(target, found, stored, cfg.lora, weights))
        except KeyError as error:
            raise HubError(f"{folder / WEIGHTS} lacks {error} beside its other half; save the adapter again") from error
        left -= {name for name in stored for module in target.modules if name.startswith(_PREFIX + module + ".")}
    if left:
        raise HubError(f"{folder / WEIGHTS} holds tensors that have no place in {family.name}: {', '.join(sorted(left))}")
    return out


def _inner(target: Target, stored: Mapping[str, Tensor]) -> list[Tensor]:
    """The different a of a projection's foreign modules: where modules that are one matrix here were adapted apart, all of them."""
    parts = [stored[f"{_PREFIX}{module}.lora_A.weight"] for module in target.modules if f"{_PREFIX}{module}.lora_A.weight" in stored]
    return parts[:1] if all(torch.equal(part, parts[0]) for part in parts) and len(parts) == len(target.modules) else parts


def _read_target(target: Target, found: list[Target], stored: Mapping[str, Tensor], cfg: LoraConfig,
                 weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if target.parameter is not None:
        key, experts = _stacked_key(target, found), target.p.shape[0]
        yield target.adapter("a"), stored[f"{key}.lora_A.weight"].unflatten(0, (experts, -1))
        yield target.adapter("b"), stored[f"{key}.lora_B.weight"].unflatten(1, (-1, experts)).permute(2, 0, 1)
        return
    inner = _inner(target, stored)
    b = inner[0].new_zeros(target.p.shape[0], sum(map(len, inner)))
    column, magnitude = 0, inner[0].new_zeros(target.p.shape[0])
    for module, block in zip(target.modules, target.blocks, strict=True):
        if f"{_PREFIX}{module}.lora_A.weight" not in stored:
            continue  # not adapted there: its rows stay zero
        theirs = _ours(stored[f"{_PREFIX}{module}.lora_B.weight"], block)
        rows, rank = slice(block.start[0], block.start[0] + block.size[0]), theirs.shape[1]
        b[rows, column : column + rank] = theirs * (lora.scale(rank, cfg) / lora.scale(b.shape[1], cfg))
        column += rank if len(inner) > 1 else 0
        if cfg.dora:
            length = _ours(stored[f"{_PREFIX}{module}.lora_magnitude_vector"], block)
            magnitude[rows] = length / lora.row_lengths(weights[target.path])[rows] - 1
    if cfg.dora:
        yield target.adapter("magnitude"), magnitude
    yield target.adapter("a"), torch.cat(inner)
    yield target.adapter("b"), b
