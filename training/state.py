"""What a training step changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model import params
from model.params import Tree
from parallel import sharding
from parallel.mesh import Mesh


@dataclass(frozen=True)
class State:
    """Everything that a step changes, by dotted path: DTensors in fp32 or wider (parameters and AdamW's moments) and plain buffers."""

    step: int  # updates done
    params: dict[str, Any]
    buffers: dict[str, Tensor]
    first: dict[str, Any]  # of the trained parameters alone
    second: dict[str, Any]

    @property
    def trained(self) -> dict[str, Any]:
        """The parameters that are not frozen."""
        return {name: self.params[name] for name in self.first}

    def leaves(self) -> dict[str, Tensor]:
        """What a forward pass reads: this rank's shards of the parameters, gradients on for the trained ones, and the buffers."""
        return {name: shard.requires_grad_(name in self.first) for name, shard in sharding.local(self.params).items()} | self.buffers


def init_state(spec: Tree, seed: int, mesh: Mesh, dtype: torch.dtype = torch.float32, known: Mapping[str, Any] | None = None) -> State:
    """Parameters, freshly drawn (in fp32, then stored in `dtype`) where not `known`, and zero moments of the trained ones, all sharded."""
    weights, buffers = params.split_kinds(spec, sharding.init_sharded(spec, seed, mesh, dtype, known))
    trained = {name for name, p in params.named_leaves(spec) if p.trained}
    zeros = [{name: torch.zeros_like(w) for name, w in weights.items() if name in trained} for _ in range(2)]
    return State(0, weights, buffers, *zeros)
