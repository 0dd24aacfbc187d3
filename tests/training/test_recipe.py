"""docs/fine_tuning.md: its commands, in their order, without the training between them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evaluate
from model import speech_lm
from model.hub import __main__ as hub
from parallel.mesh import make_mesh, start_processes
from parallel.validate import Environment, validate
from tests.training.test_experiments import EXPERIMENTS
from training import checkpoint, config, launch, loop
from training.state import init_state

TEXT = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()


def commands() -> Iterator[list[str]]:
    """The words of each command, without `python`."""
    for block in re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        yield from (shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines())


def trained(arguments: list[str]) -> Any:
    """What a training leaves, of no step, and its configuration."""
    cfg, missing = config.load(arguments)
    assert missing == []
    assert validate(cfg, Environment(1, "train.py")) == []
    launch.check_data(cfg)
    start_processes(torch.device("cpu"))
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    known = loop.pretrained(cfg, mesh)[0] if cfg.model.pretrained else {}
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh, known=known)
    checkpoint.save(Path(cfg.run_dir), state, None, mesh, cfg.train.steps, config.to_dict(cfg))
    return cfg


def test_the_recipe_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done, runs = [], []
    for name, *arguments in commands():
        done.append(name)
        if name == "train.py":
            runs.append(trained(arguments))
        elif name == "evaluate.py":
            assert evaluate.prepare(arguments)[2].run_dir == runs[-1].run_dir
        else:
            assert arguments[0] == "model.hub"
            assert hub.run(arguments[1:]).get("not_finite", 0) == 0
    assert done == ["train.py", "-m", "-m", "train.py", "evaluate.py", "-m", "-m"]
    given, tuned = runs
    assert tuned.model.decoder == given.model.decoder
    assert "+experiment=canary_qwen_lora" in TEXT
    assert f"model={EXPERIMENTS['canary_qwen_lora'][1]}" in TEXT
    assert tuned.model.lora.rank > 0
    assert hub.run(["verify", "runs/long_hf", "runs/short_hf"])["different"] == 0  # updates start at nothing
