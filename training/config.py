"""Composes the configuration: schema, configs/*.yaml, command line. Every fault becomes one sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence: what, where, what to do."""


def load(overrides: Sequence[str]) -> Config:
    """The typed configuration of `train.py OVERRIDES`.

    :raises ConfigError: unknown key, wrong type, missing mandatory key, misplaced experiment file, malformed override.
    """
    cfg = composed(overrides)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: add {' '.join(f'{key}=...' for key in missing)} to the command")
    result: Any = OmegaConf.to_object(cfg)
    return result


def composed(overrides: Sequence[str]) -> DictConfig:
    """The merged configuration, mandatory keys possibly still missing."""
    ConfigStore.instance().store("schema", Config)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error, overrides)) from error


def _sentence(error: Exception, overrides: Sequence[str]) -> str:
    cause = error.__cause__ or error
    lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
    text = lines[0].rstrip(".:")
    key = getattr(cause, "full_key", None)
    if "Key 'experiment' not in" in str(error):
        return "an experiment file was nested under experiment: put '# @package _global_' into its first line"
    if key and str(key) not in text:
        text += f" (at {key})"
    if "Could not override" in text or "not in struct" in str(error):
        text = next((line for line in lines if "not in" in line), text).rstrip(".") + f", in {' '.join(overrides)}"
    return f"{text}; every key with its type and default is in configs/schema.py"


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
