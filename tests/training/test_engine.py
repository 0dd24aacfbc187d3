"""What is left in memory of a unit that has run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from configs.schema import CompileConfig, ParallelConfig
from model import params
from model.params import P
from parallel.gather import Reshard
from parallel.mesh import make_mesh, start_processes
from training.engine import Engine, Pass


@pytest.mark.parametrize("training", [True, False])
def test_activations_stay_for_backward_alone(training: bool) -> None:
    """What each layer saves for a backward pass is there as long as the result is, and in evaluation gone with the layer."""
    start_processes(torch.device("cpu"))
    spec = {"layers": [{"w": P((4, 4), ("ffn", "embed"))} for _ in range(3)]}
    keys, mesh = [(f"layers.{i}",) for i in range(3)], make_mesh(ParallelConfig(), torch.device("cpu"))
    engine = Engine(spec, iter(keys), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(params.init(spec, 0))}
    saved: list[StorageWeakRef] = []

    def layer(w: dict[str, Tensor], x: Tensor, ctx: Any) -> Tensor:
        h = torch.tanh(x @ w["w"])  # whose backward reads h
        saved.append(StorageWeakRef(h.untyped_storage()))
        return x + h.sum()

    run, x = Pass(engine, leaves, SimpleNamespace(training=training)), torch.ones(2, 4)
    for key in keys:
        x = run(key, layer, x)
    assert x.requires_grad
    assert [not storage.expired() for storage in saved] == [training] * 3
