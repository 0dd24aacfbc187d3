"""The schema refuses what it does not know, so that a misspelt key or a value of another kind ends a run before it starts."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from omegaconf import MissingMandatoryValue, OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from configs.schema import Config
from training.config import CONFIG_DIR, composed, load


def merged(*overrides: str) -> Any:
    return OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(overrides)))


@pytest.mark.parametrize("override", ["stepz=1", "train.stepz=1", "model.decoder.n_head=4", "optimizer.betas2=0.9", "data.row=[]"])
def test_unknown_key_is_refused_by_its_name(override: str) -> None:
    with pytest.raises(ConfigKeyError, match=override.split("=")[0].split(".")[-1]):
        merged(override)


@pytest.mark.parametrize("override", [
    "train.steps=abc", "train.steps=1.5", "train.steps=null", "optimizer.lr=fast", "compile.enabled=perhaps", "model.decoder=M*",
    "model.decoder.rope_theta=none", "optimizer.betas=[0.9,x]", "data.validation=dev.jsonl",
    "data.rows=[{tokens: many}]", "data.rows=[{token: 5}]", "parallel.ep=[2]",
])
def test_value_of_another_type_is_refused(override: str) -> None:
    with pytest.raises((ValidationError, ConfigKeyError)):
        merged(override)


def test_values_of_the_right_type_are_taken() -> None:
    config = merged("train.steps=20", "optimizer.lr=2e-3", "model.decoder.rope_theta=null", "compile.enabled=false",
                    "data.validation.dev=dev.jsonl", "data.rows=[{tokens: 64, utterances: 4}]", "model.decoder.pattern=M*E-")
    assert (config.train.steps, config.optimizer.lr, config.model.decoder.rope_theta, config.compile.enabled) == (20, 2e-3, None, False)
    assert config.data.validation == {"dev": "dev.jsonl"}
    assert (config.data.rows[0].tokens, config.data.rows[0].utterances) == (64, 4)
    assert config.model.decoder.pattern == "M*E-"


@pytest.mark.parametrize("key", ["run_dir", "data.manifest", "data.tokenizer"])
def test_keys_without_a_sensible_default_are_mandatory(key: str) -> None:
    with pytest.raises(MissingMandatoryValue, match=key.split(".")[-1]):
        OmegaConf.select(merged(), key, throw_on_missing=True)


@pytest.mark.parametrize(("tp", "multiple", "expected"), [(1, 3, 3), (2, 1, 256), (2, 3, 768), (4, 64, 512)])
def test_tensor_parallelism_pads_the_vocabulary(tp: int, multiple: int, expected: int) -> None:
    cfg, _ = load(["+experiment=digits", f"parallel.tp={tp}", f"model.decoder.vocab_multiple={multiple}"])
    assert cfg.model.decoder.vocab_multiple == expected


def test_schema_makes_objects_of_its_own_classes() -> None:
    config = OmegaConf.to_object(merged("run_dir=r", "data.manifest=m", "data.tokenizer=t", "data.rows=[]"))
    assert isinstance(config, Config)
    nested = [getattr(config, f.name) for f in fields(config) if is_dataclass(f.type)]
    assert len(nested) >= 6
    assert all(is_dataclass(value) for value in nested)


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml"))])
def test_every_experiment_composes_with_every_model_and_keeps_its_own_run_dir(name: str) -> None:
    for model in (path.stem for path in sorted((CONFIG_DIR / "model").glob("*.yaml"))):
        config = composed([f"+experiment={name}", f"model={model}"])
        assert config.run_dir == f"runs/{name}"
        assert OmegaConf.missing_keys(config) <= {"data.manifest", "data.tokenizer"}
