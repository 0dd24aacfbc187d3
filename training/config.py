"""Composes the configuration: schema, configs/*.yaml, command line. Every fault becomes one sentence."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from configs.schema import Config
from model.hub.adapter import read_settings
from model.hub.family import HubError
from model.hub.load import read_config
from parallel.names import KEYS

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


ROWS_A_RANK = 128  # of embedding and head, a multiple
PARTS = ("encoder", "projector", "decoder")
# what the tensors of a published model say nothing about, and its configuration therefore does not decide
TRAINING_KEYS = ("aux_loss_coeff", "bias_update_rate", "force_balance", "freeze_batch_norm", "init_std", "sync_batch_norm",
                 "vocab_multiple")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence: what, where, what to do."""


def load(overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The typed configuration of `train.py OVERRIDES`, and a sentence for each mandatory key that is missing (its value is then empty).

    :raises ConfigError: unknown key, wrong type, misplaced experiment file, malformed override.
    """
    cfg = composed(overrides)
    with_pretrained(cfg, overrides)
    try:
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(cfg))  # Hydra's + adds keys that the schema lacks
    except ConfigKeyError as error:
        raise ConfigError(_elsewhere(str(error.full_key)) or f"unknown key {error.full_key} in {' '.join(overrides)}; every key with its "
                          "type and default is in configs/schema.py") from error
    missing = sorted(OmegaConf.missing_keys(cfg))
    for key in missing:
        OmegaConf.update(cfg, key, "")
    result: Any = OmegaConf.to_object(cfg)
    _fit_layout(result)
    return result, [f"{key} must be given: add {key}=... to the command" for key in missing]


def _fit_layout(cfg: Config) -> None:
    """Under tensor parallelism every rank's rows of embedding and head are a multiple of 128; documents that are cut have equal parts."""
    if cfg.parallel.tp > 1 <= cfg.model.decoder.vocab_multiple:
        cfg.model.decoder.vocab_multiple = math.lcm(cfg.model.decoder.vocab_multiple, ROWS_A_RANK * cfg.parallel.tp)
    if cfg.parallel.cp_split == "document" and cfg.parallel.cp > 1 <= cfg.data.multiple:
        cfg.data.multiple = math.lcm(cfg.data.multiple, 2 * cfg.parallel.cp)


def with_pretrained(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Puts the sizes of the published models that `cfg` starts from into it, under what the command line says.

    :raises ConfigError: a folder that is none, or of a model that is not served
    """
    parts = tuple(f"model.{part}" for part in (*PARTS, "lora"))
    typed = [o for o in OverridesParser.create().parse_overrides(list(overrides)) if o.key_or_group.startswith(parts)]
    for key, wanted in (("pretrained", PARTS), ("pretrained_encoder", PARTS[:1])):
        path = None if OmegaConf.is_missing(cfg.model, key) else cfg.model[key]
        if path is None:
            continue
        try:
            family, found = read_config(Path(path))
        except HubError as error:
            raise ConfigError(f"model.{key}={path}: {error}") from error
        for part in wanted:
            if any(prefix.startswith(part) for prefix in family.part):
                values = {name: value for name, value in asdict(getattr(found, part)).items() if name not in TRAINING_KEYS}
                OmegaConf.update(cfg, f"model.{part}", values, merge=True)
    _with_adapter(cfg)
    for override in typed:
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=override.is_add() or override.is_force_add())


def _with_adapter(cfg: DictConfig) -> None:
    """Puts the settings of the adapter that `cfg` starts from into it."""
    start = cfg.model.lora.start
    if start is None:
        return
    if cfg.model.pretrained is None:
        raise ConfigError(f"model.lora.start={start} needs the model that it belongs to; give its folder as model.pretrained")
    try:
        settings = read_settings(Path(start), *read_config(Path(cfg.model.pretrained)))
    except HubError as error:
        raise ConfigError(f"model.lora.start={start}: {error}") from error
    OmegaConf.update(cfg, "model.lora", OmegaConf.structured(replace(settings, start=start)), merge=False)


def composed(overrides: Sequence[str]) -> DictConfig:
    """The merged configuration, mandatory keys possibly still missing."""
    ConfigStore.instance().store("schema", Config)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error, overrides)) from error
    except AssertionError as error:  # OmegaConf's, where a key leads through a value that is no group
        raise ConfigError(f"one of {' '.join(overrides)} names a key inside what another sets to null; leave one of the two out") from error


def _elsewhere(path: str) -> str | None:
    """What there is instead of a key that other systems have."""
    instead = KEYS.get(path.rpartition(".")[2])
    return instead and f"{path} is no key here: {instead}; leave it out"


def _sentence(error: Exception, overrides: Sequence[str]) -> str:
    """What Hydra and OmegaConf say over several lines and causes, as what, where and what to do."""
    chain = [error]
    while chain[-1].__cause__ is not None and isinstance(chain[-1].__cause__, Exception):
        chain.append(chain[-1].__cause__)
    lines = [line.strip().rstrip(".") for cause in chain for line in str(cause).splitlines() if line.strip()]
    if any("Key 'experiment' not in" in line for line in lines):
        return "an experiment file was nested under the key experiment: put '# @package _global_' into its first line"
    if any("Could not override 'experiment'" in line for line in lines):
        return f"write +experiment=..., with a plus, in {' '.join(overrides)}"
    told = next((line for mark in ("Value ", "not in ", "Could not find") for line in lines if mark in line), lines[0])
    other = re.search(r"Could not override '((?:\w+\.)*\w+)'", lines[0])
    if other and (instead := _elsewhere(other[1])):
        return instead
    group = re.search(r"Could not find '([a-z]+)/", told)
    if group:
        names = ", ".join(sorted(file.stem for file in (CONFIG_DIR / group[1]).glob("*.yaml")))
        return f"{told} in {' '.join(overrides)}; there are {names}"
    where = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    place = f" at {where}" if where and where not in told else ""
    if "mismatched input" in told or "LexerNoViableAlt" in told:
        return f"the command line {' '.join(overrides)} cannot be read: {told}; quote a value with special characters as 'key=\"value\"'"
    return f"{told}{place} in {' '.join(overrides) or 'configs/'}; every key with its type and default is in configs/schema.py"


def to_yaml(cfg: Config | DictConfig) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg), resolve=False)


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain containers, for meta.json of a checkpoint."""
    result: Any = OmegaConf.to_container(OmegaConf.structured(cfg))
    return result


def from_dict(content: dict[str, Any]) -> Config:
    """The inverse of `to_dict`; refuses keys of another version."""
    try:
        result: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), content))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the stored configuration does not fit this version: {str(error).splitlines()[0]}") from error
    return result
