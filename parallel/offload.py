"""State in the memory of the host (parallel.offload).

Parameters in fp32 and moments stay there and are updated there. A forward pass reads copies of the shards in the compute dtype, which are
on the device ("optimizer") or on the host too ("parameters"), from where a unit fetches them when it is gathered. Gradient shards come to
the host before the update, which the copies then follow. On a CPU all of it is one memory, and the same code runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel import sharding
from parallel.mesh import Mesh

HOST = torch.device("cpu")


def on_host(t: Any, mesh: Mesh) -> Any:
    """A DTensor with its shard in memory of the host, pinned where a GPU reads it; whatever is no DTensor as it is."""
    if mesh.device.type == "cpu" or not isinstance(t, DTensor):
        return t
    return DTensor(to_host([t.to_local()])[0], t._spec, requires_grad=False)


def copies(parameters: Mapping[str, Any], offload: str, mesh: Mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    """What forward passes read of parameters on the host: shards in the compute dtype."""
    found = {}
    for name, shard in sharding.local(dict(parameters)).items():
        copy = shard.to(mesh.device if offload == "optimizer" else HOST, dtype)
        copy = _pinned(copy) if offload == "parameters" and mesh.device.type != "cpu" and copy.dtype != shard.dtype else copy
        found[name] = copy
    return found


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in memory of the host, where they have arrived."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    moved = [t if t.device.type == "cpu" else _pinned(t) for t in tensors]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _pinned(t: Tensor) -> Tensor:
    return torch.empty_like(t, device=HOST, pin_memory=True, memory_format=torch.contiguous_format).copy_(t, non_blocking=True)
