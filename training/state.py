"""What a training step changes."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model import params
from model.params import Tree
from parallel import offload, sharding
from parallel.mesh import Mesh


@dataclass(frozen=True)
class State:
    """Everything that a step changes, by dotted path: DTensors (parameters and AdamW's moments) and plain buffers."""

    step: int  # updates done
    params: dict[str, Any]
    buffers: dict[str, Tensor]
    first: dict[str, Any]  # of the trained parameters alone
    second: dict[str, Any]
    copies: dict[str, Tensor] = field(default_factory=dict)  # of parameters on the host: what a forward pass reads (parallel/offload.py)

    @property
    def trained(self) -> dict[str, Any]:
        """The parameters that are not frozen."""
        return {name: self.params[name] for name in self.first}

    def leaves(self) -> dict[str, Tensor]:
        """What a forward pass reads: this rank's shards of the parameters, gradients on for the trained ones, and the buffers."""
        shards = self.copies or sharding.local(self.params)
        for shard in shards.values():
            if shard.dtype == torch.bfloat16:
                shard.grad_dtype = torch.float32  # as they arrive
        return {name: shard.requires_grad_(name in self.first) for name, shard in shards.items()} | self.buffers

    def refresh(self) -> None:
        """Write the parameters, which have changed, into the copies."""
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.copy_(self.params[name].to_local(), non_blocking=True)


def init_state(spec: Tree, seed: int, mesh: Mesh, dtype: torch.dtype = torch.float32, known: Mapping[str, Any] | None = None,
               offloaded: str = "none", compute: torch.dtype = torch.float32, moments: torch.dtype | None = None) -> State:
    """Parameters, freshly drawn (in fp32, then stored in `dtype`) where not `known`, and zero moments of the trained ones, all sharded.

    :param offloaded: "none", or what is on the host: "optimizer" or "parameters"
    :param compute: dtype of the copies of what is there
    :param moments: their dtype; None: that of the parameters
    """
    place = functools.partial(offload.on_host, mesh=mesh) if offloaded != "none" else None
    weights, buffers = params.split_kinds(spec, sharding.init_sharded(spec, seed, mesh, dtype, known, place))
    trained = {name for name, p in params.named_leaves(spec) if p.trained}
    learned = {name: w for name, w in weights.items() if name in trained}
    first, second = ({name: torch.zeros_like(w, dtype=moments or dtype) for name, w in learned.items()} for _ in range(2))
    copies = offload.copies(weights, offloaded, mesh, compute) if offloaded != "none" else {}
    return State(0, weights, buffers, first, second, copies)
