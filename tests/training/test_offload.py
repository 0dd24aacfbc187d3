"""State on the host: the same bits as on the device, in copies that only a forward pass reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from model.params import P
from parallel import sharding
from parallel.gather import Reshard, Unit
from parallel.mesh import make_mesh, start_processes
from tests.dist.first_worker import rows
from tests.training.test_step import SMALL
from training import checkpoint, config
from training.state import State
from training.step import make_engine, make_gradients, make_state, make_step


def trained(offload: str, precision: str, steps: int = 2, folder: Path | None = None) -> tuple[State, list[float]]:
    """The state after some steps, and their gradient norms; with a folder it goes through a checkpoint after the first."""
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, f"precision={precision}", f"parallel.offload={offload}", "optimizer.lr=0.01"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    step, state, norms = make_step(cfg, mesh, make_engine(cfg, mesh)), make_state(cfg, mesh), []
    for number in range(steps):
        state, metrics = step(state, rows(cfg, number)[:1])
        norms.append(metrics["grad_norm"].item())
        if folder is not None and number == 0:
            path = checkpoint.save(folder, state, {}, mesh, 2, {})
            state, _ = checkpoint.load(path, make_state(cfg, mesh), mesh)
    return state, norms


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_host_computes_the_same_bits(precision: str, tmp_path: Path) -> None:
    expected, norms = trained("none", precision)
    for offload in ("optimizer", "parameters"):
        got, found = trained(offload, precision, folder=tmp_path / offload if precision == "bf16" else None)
        assert found == norms
        for group in ("params", "first", "second"):
            for name, tensor in getattr(expected, group).items():
                assert torch.equal(tensor.to_local(), getattr(got, group)[name].to_local()), (offload, group, name)
        assert set(got.copies) == set(got.params)
        for name, copy in got.copies.items():
            assert torch.equal(copy, got.params[name].to_local().to(copy.dtype))


def test_gradients_are_wider_than_the_copies_that_they_are_of() -> None:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, "precision=bf16", "parallel.offload=optimizer"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state = make_state(cfg, mesh)
    grads = make_gradients(cfg, mesh, make_engine(cfg, mesh))(state, rows(cfg, 0)).grads
    assert {copy.dtype for copy in state.copies.values()} == {torch.bfloat16}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    grad = max(grads.values(), key=torch.numel)
    assert not torch.equal(grad, grad.to(torch.bfloat16).float())  # two rows were added up without rounding


def test_weights_come_to_the_device_from_the_host() -> None:
    start_processes(torch.device("cpu"))
    mesh = make_mesh(config.load(SMALL)[0].parallel, torch.device("cpu"))
    leaf, shard = P((4, 2), ("embed", "ffn")), torch.ones(4, 2)
    for elsewhere in (False, True):
        unit = Unit([leaf], replace(mesh, device=torch.device("meta")) if elsewhere else mesh, torch.float32, Reshard(), fetched=True)
        (whole,) = unit.finish(unit.start([shard]))
        assert whole is not None
        assert whole.device.type == ("meta" if elsewhere else "cpu")
        assert whole.data_ptr() != shard.data_ptr()
        assert unit.reshard  # goes after forward, though nobody else has a part of it


def test_a_shard_may_be_elsewhere_than_the_mesh() -> None:
    """Of torch, on which moments on the host rely."""
    start_processes(torch.device("cpu"))
    mesh = make_mesh(config.load(SMALL)[0].parallel, torch.device("cpu"))
    here = sharding.shard(P((4, 2), ("embed", "ffn")), torch.ones(4, 2), mesh)
    there = DTensor(torch.empty(4, 2, device="meta"), here._spec, requires_grad=False)
    zeros: Any = torch.zeros_like(there)
    assert zeros.to_local().device.type == "meta"
    assert there.device.type == "meta"
