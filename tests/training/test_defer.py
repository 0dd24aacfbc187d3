"""When gradients wait for the last row of a step."""

import math
from dataclasses import replace

import pytest
import torch

from model import params, speech_lm
from parallel.mesh import make_mesh, start_processes
from training import config, step


@pytest.mark.parametrize(("overrides", "world", "memory_bytes", "expected"), [
    (["train.accumulate=2"], 2, 1 << 40, True),
    (["train.accumulate=2"], 2, 0, False),  # auto: no room
    (["train.accumulate=2", "parallel.zero_stage=2"], 2, 0, False),
    (["train.accumulate=2", "parallel.zero_stage=1"], 2, 0, True),  # whole anyway
    (["train.accumulate=2", "parallel.zero_stage=ddp"], 2, 0, True),
    (["train.accumulate=2", "parallel.zero_stage=1", "parallel.defer_grad_sync=false"], 2, 1 << 40, False),
    (["train.accumulate=2", "parallel.defer_grad_sync=true"], 2, 0, True),
    (["train.accumulate=2", "parallel.defer_grad_sync=false"], 2, 1 << 40, False),
    (["train.accumulate=1", "parallel.defer_grad_sync=true"], 2, 1 << 40, False),
    (["train.accumulate=2", "parallel.defer_grad_sync=true"], 1, 1 << 40, False),
    (["train.accumulate=2", "compile.scope=step"], 2, 1 << 40, False),
])
def test_defers(monkeypatch: pytest.MonkeyPatch, overrides: list[str], world: int, memory_bytes: int, expected: bool) -> None:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load(["+experiment=digits", *overrides])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    monkeypatch.setattr(step, "memory_bytes", lambda device: memory_bytes)
    assert step.defers_gradients(cfg, replace(mesh, sizes=replace(mesh.sizes, world=world))) is expected


def test_the_whole_gradients_may_take_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load(["+experiment=digits", "train.accumulate=2", "model.freeze_params=[encoder]"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    two = replace(mesh, sizes=replace(mesh.sizes, world=2))
    leaves = [p for _, p in params.named_leaves(speech_lm.spec(cfg)) if p.kind == "param" and p.trained]
    trained = sum(math.prod(p.shape) for p in leaves)
    for memory, expected in ((16 * trained, True), (16 * trained - 4, False)):
        monkeypatch.setattr(step, "memory_bytes", lambda device, memory=memory: memory)
        assert step.defers_gradients(cfg, two) is expected
