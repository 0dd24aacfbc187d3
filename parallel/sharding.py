"""Which mesh dimension each logical axis of a parameter goes to. Adding a parallelism is adding rows to RULES.

Every parameter is sharded by the fully-sharded dimension ("dp_shard", for experts "ep_shard") over one of its own dimensions:
"embed" where it has one, else its largest that no rule has taken. Buffers are replicated.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from model import params
from model.params import P, Tree
from parallel.mesh import Mesh

RULES = {"experts": "ep"}  # logical axis -> mesh dimension
FULLY_SHARDED = ("dp_shard", "ep_shard")


def device_mesh(p: P, mesh: Mesh) -> DeviceMesh:
    """Experts live on the expert mesh, everything else on the dense one."""
    return mesh.experts if "experts" in p.axes else mesh.dense


def sharded_dim(p: P) -> int:
    """The tensor dimension that the fully-sharded mesh dimension splits."""
    free = [d for d, axis in enumerate(p.axes) if axis not in RULES]
    if not free:
        raise ValueError(f"a parameter with axes {p.axes} leaves no dimension to shard; give it one more axis")
    return next((d for d in free if p.axes[d] == "embed"), max(free, key=lambda d: p.shape[d]))


def placements(p: P, mesh: Mesh) -> list[Placement]:
    """One placement a dimension of `device_mesh(p, mesh)`."""
    if p.kind == "buffer":
        return [Replicate() for _ in range(device_mesh(p, mesh).ndim)]
    taken = {RULES[axis]: d for d, axis in enumerate(p.axes) if axis in RULES}
    if len(taken) != sum(axis in RULES for axis in p.axes):
        raise ValueError(f"two axes of {p.axes} go to the same mesh dimension; change RULES in parallel/sharding.py")
    names = device_mesh(p, mesh).mesh_dim_names or ()
    return [Shard(sharded_dim(p) if name in FULLY_SHARDED else taken[name]) for name in names]


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of a dimension, as DTensor and torch.chunk split it: equal parts, the last ones shorter or empty."""
    chunk = math.ceil(size / parts)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def local_box(p: P, mesh: Mesh) -> list[tuple[int, int]]:
    """Start and length of this rank's part in each dimension of a parameter; the whole of a buffer."""
    where, box = device_mesh(p, mesh), [(0, length) for length in p.shape]
    for i, placement in enumerate(placements(p, mesh)):
        if isinstance(placement, Shard):
            start, length = box[placement.dim]
            inner, part = chunk_bounds(length, where.size(i), where.get_local_rank(i))
            box[placement.dim] = (start + inner, part)
    return box


def shard(p: P, full: Tensor, mesh: Mesh) -> Any:
    """This rank's part of `full` as a DTensor; a buffer stays a plain tensor."""
    if p.kind == "buffer":
        return full.to(mesh.device)
    local = full[tuple(slice(start, start + length) for start, length in local_box(p, mesh))]
    local = local.to(mesh.device).clone(memory_format=torch.contiguous_format)
    return from_local(p, local, mesh)


def from_local(p: P, local: Tensor, mesh: Mesh) -> DTensor:
    """A DTensor of `p`'s global shape around this rank's part (whose own shape may be shorter, or empty)."""
    stride = tuple(math.prod(p.shape[d + 1 :]) for d in range(len(p.shape)))
    return DTensor.from_local(
        local, device_mesh(p, mesh), placements(p, mesh), run_check=False, shape=torch.Size(p.shape), stride=stride)


def init_sharded(spec: Tree, seed: int, mesh: Mesh) -> Tree:
    """Every leaf of `spec` drawn in full and cut to this rank's part, one at a time, so that all world sizes start bit-equal."""
    return params.map_named(lambda path, p: shard(p, params.draw(path, p, seed), mesh), spec)


def local(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's shards, sharing memory with the DTensors."""
    with torch.no_grad():
        return {name: t.to_local() for name, t in tensors.items()}
