"""Which mesh dimension each logical axis of a parameter goes to. Adding a parallelism is adding rows to RULES.

Every parameter is fully sharded over one of its own dimensions: "embed" where it has one, else its largest that is not split. Buffers are
replicated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from model import params
from model.params import P, Tree
from parallel.mesh import Mesh

# Logical axis -> view of the ranks (parallel/mesh.py) whose last dimension splits it. What is not here arrives whole in a layer, which then
# takes its part: matrices of several blocks (gate and up, the five inputs of Mamba-2), keys and values, whose heads may be fewer than tp.
RULES = {"experts": "experts", "queries": "tensor", "hidden": "tensor", "mamba_inner": "tensor", "vocab": "tensor"}


@dataclass(frozen=True)
class Place:
    """Where a parameter is: dimension 0 of `mesh` holds copies, 1 shards of tensor dimension `dim`, 2, if any, parts of `split`."""

    mesh: DeviceMesh
    dim: int
    split: int | None

    @property
    def placements(self) -> list[Placement]:
        """As DTensor has them."""
        return [Replicate(), Shard(self.dim)] + ([] if self.split is None else [Shard(self.split)])

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        return self.mesh.size(0)


def split_dim(p: P, mesh: Mesh) -> int | None:
    """The tensor dimension that a model axis (ep, tp) splits; None where none does.

    Vectors are not split over tp: they are small, and whoever uses one cuts it (parallel/tensor.py).
    """
    split = [d for d, axis in enumerate(p.axes) if axis in RULES and getattr(mesh, RULES[axis]) is not None]
    split = [d for d in split if RULES[p.axes[d]] != "tensor" or len(p.shape) > 1]
    if len(split) > 1:
        raise ValueError(f"{[p.axes[d] for d in split]} of one parameter are both split; change RULES in parallel/sharding.py")
    return split[0] if split else None


def sharded_dim(p: P, split: int | None = None) -> int:
    """The tensor dimension that the fully-sharded mesh dimension splits, another one than `split`."""
    free = [d for d in range(len(p.axes)) if d != split]
    if not free:
        raise ValueError(f"a parameter with axes {p.axes} leaves no dimension to shard; give it one more axis")
    return next((d for d in free if p.axes[d] == "embed"), max(free, key=lambda d: p.shape[d]))


def place(p: P, mesh: Mesh) -> Place:
    """Where a parameter is."""
    split = split_dim(p, mesh)
    view = mesh.dense if split is None else getattr(mesh, RULES[p.axes[split]])
    return Place(view, sharded_dim(p, split), split)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of a dimension, as DTensor and torch.chunk split it: equal parts, the last ones shorter or empty."""
    chunk = math.ceil(size / parts)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def local_shape(p: P, where: Place) -> tuple[int, ...]:
    """What the fully-sharded dimension is cut from: the whole shape, or this rank's part of a split one."""
    shape = list(p.shape)
    if where.split is not None:
        shape[where.split] = chunk_bounds(shape[where.split], where.mesh.size(2), where.mesh.get_local_rank(2))[1]
    return tuple(shape)


def local_box(p: P, mesh: Mesh) -> list[tuple[int, int]]:
    """Start and length of this rank's part in each dimension of a parameter; the whole of a buffer."""
    box = [(0, length) for length in p.shape]
    if p.kind == "buffer":
        return box
    where = place(p, mesh)
    for i, placement in enumerate(where.placements):
        if isinstance(placement, Shard):
            start, length = box[placement.dim]
            inner, part = chunk_bounds(length, where.mesh.size(i), where.mesh.get_local_rank(i))
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
    stride, where = tuple(math.prod(p.shape[d + 1 :]) for d in range(len(p.shape))), place(p, mesh)
    return DTensor.from_local(local, where.mesh, where.placements, run_check=False, shape=torch.Size(p.shape), stride=stride)


def init_sharded(spec: Tree, seed: int, mesh: Mesh, dtype: torch.dtype = torch.float32, known: Mapping[str, Any] | None = None,
                 put: Callable[[Any], Any] | None = None) -> Tree:
    """Every leaf of `spec` drawn in full and cut to this rank's part, one at a time, so that all world sizes start bit-equal; buffers are
    fp32 or wider.

    :param known: leaves, by dotted path, that are here already
    :param put: moves each leaf to where it stays
    """
    def leaf(path: str, p: P) -> Any:
        stored = dtype if p.kind == "param" else torch.promote_types(dtype, torch.float32)
        found = known[path].to(stored) if known and path in known else shard(p, params.draw(path, p, seed).to(stored), mesh)
        return found if put is None else put(found)

    return params.map_named(leaf, spec)


def local(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's shards, sharing memory with the DTensors."""
    with torch.no_grad():
        return {name: t.to_local() for name, t in tensors.items()}
