"""ZeRO-3 for functions: a layer's sharded weights become whole for as long as the layer runs, and its gradients go back as shards.

All tensors of a layer that are sharded over the same group travel together: one all-gather in forward, one in backward (the gathered
weights are not kept in between), one reduce-scatter of the gradients. Tensors that nothing needs to move or cast are passed as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from model.params import P
from parallel import sharding
from parallel.collectives import all_gather_start, reduce_scatter, wait
from parallel.mesh import Mesh


@dataclass(frozen=True)
class Member:
    """One tensor's place in a flat buffer."""

    index: int  # position among the unit's parameters
    dim: int  # sharded dimension
    size: int  # its full length
    local: int  # this rank's share of it
    chunk_shape: tuple[int, ...]  # one rank's part, padded to the longest

    @property
    def numel(self) -> int:
        return math.prod(self.chunk_shape)


@dataclass(frozen=True)
class FlatGroup:
    """The parameters of a unit that are sharded over one process group, as one buffer a direction."""

    group: ProcessGroup
    ranks: int
    members: tuple[Member, ...]

    def pack(self, shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's contribution to the all-gather: its (padded) parts one after the other, cast to `dtype`."""
        parts = []
        for m in self.members:
            part, missing = shards[m.index], m.chunk_shape[m.dim] - m.local
            if missing:
                part = F.pad(part, [0, 0] * (part.ndim - 1 - m.dim) + [0, missing])
            parts.append(part.to(dtype).reshape(-1))
        return torch.cat(parts)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Whole tensors out of the gathered buffer."""
        rows, offset, whole = flat.view(self.ranks, -1), 0, []
        for m in self.members:
            part = rows[:, offset : offset + m.numel].view(self.ranks, *m.chunk_shape)
            whole.append(part.movedim(0, m.dim).flatten(m.dim, m.dim + 1).narrow(m.dim, 0, m.size).contiguous())
            offset += m.numel
        return whole

    def pack_grads(self, grads: Sequence[Tensor]) -> Tensor:
        """Whole gradients as the fp32 buffer that reduce-scatter sums: rank r's parts in row r."""
        rows = []
        for m, grad in zip(self.members, grads, strict=True):
            missing = self.ranks * m.chunk_shape[m.dim] - m.size
            if missing:
                grad = F.pad(grad, [0, 0] * (grad.ndim - 1 - m.dim) + [0, missing])
            rows.append(grad.float().unflatten(m.dim, (self.ranks, -1)).movedim(m.dim, 0).reshape(self.ranks, -1))
        return torch.cat(rows, 1).view(-1)

    def unpack_grads(self, flat: Tensor) -> list[Tensor]:
        """This rank's gradient shards out of the reduced buffer."""
        parts, offset = [], 0
        for m in self.members:
            part = flat[offset : offset + m.numel].view(m.chunk_shape)
            parts.append(part.narrow(m.dim, 0, m.local))
            offset += m.numel
        return parts


class Unit:
    """The parameters that are gathered together, usually one layer, and how. Static; made once."""

    def __init__(self, leaves: Sequence[P], mesh: Mesh, dtype: torch.dtype, reshard: bool):
        self.dtype, self.reshard = dtype, reshard and mesh.world > 1
        self.cast: list[int] = []  # whole on this rank: nothing to move, a copy in the compute dtype
        by_group: dict[str, list[Member]] = {}
        groups: dict[str, ProcessGroup] = {}
        for index, p in enumerate(leaves):
            where = sharding.device_mesh(p, mesh)
            dim, ranks = sharding.sharded_dim(p), where.size(0)
            if p.kind == "buffer" or (ranks == 1 and dtype == torch.float32):
                continue  # used as it is
            if ranks == 1:
                self.cast.append(index)
                continue
            shape = list(p.shape)
            for d, axis in enumerate(p.axes):
                if axis in sharding.RULES:
                    shape[d] //= where.size(1)
            shape[dim] = math.ceil(p.shape[dim] / ranks)
            local = sharding.chunk_bounds(p.shape[dim], ranks, where.get_local_rank(0))[1]
            group = where.get_group(0)
            key = group.group_name  # dense and expert meshes may share their ranks, and then a buffer
            groups[key] = group
            by_group.setdefault(key, []).append(Member(index, dim, p.shape[dim], local, tuple(shape)))
        self.groups = [FlatGroup(groups[k], groups[k].size(), tuple(m)) for k, m in by_group.items()]
        self.moved = [m.index for g in self.groups for m in g.members] + self.cast  # order in which whole tensors come out

    def start(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Begin to gather; one buffer a group, and the tensors that are only cast."""
        return [all_gather_start(g.pack(shards, self.dtype), g.group) for g in self.groups] + [shards[i].to(self.dtype) for i in self.cast]

    def finish(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, in the order of `moved`."""
        whole = [t for g, flat in zip(self.groups, flats, strict=False) for t in g.unpack(wait(flat))]
        return whole + list(flats[len(self.groups) :])

    def reduce(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradient shards in the order of `moved` from whole gradients in the same order."""
        out, first = [], 0
        for g in self.groups:
            out += g.unpack_grads(reduce_scatter(g.pack_grads(grads[first : first + len(g.members)]), g.group))
            first += len(g.members)
        return out + [grad.float() for grad in grads[first:]]


class Use:
    """One use of a unit in one forward pass, and its second gathering in the backward pass.

    `before` is the use that ran earlier: while this unit's backward runs, that one's weights are already on their way.
    """

    def __init__(self, unit: Unit, shards: Sequence[Tensor], before: "Use | None" = None):
        self.unit, self.shards, self.before = unit, shards, before
        self.flats: list[Tensor] | None = None  # gathering under way
        self.whole: list[Tensor] | None = None  # gathered, in backward
        self.storages: dict[int, int] = {}  # storage of a whole tensor -> its position
        self.saved_any = False  # whether backward needs a whole tensor
        self.alive: list[StorageWeakRef] = []

    def start(self) -> None:
        """Begin to gather, unless that has happened."""
        if self.flats is None and self.whole is None:
            with torch.no_grad():
                self.flats = self.unit.start(self.shards)
                self.alive += [StorageWeakRef(t.untyped_storage()) for t in self.flats]

    def finish(self) -> list[Tensor]:
        """The whole tensors; starts the gathering if nobody has."""
        self.start()
        with torch.no_grad():
            assert self.flats is not None
            whole, self.flats = self.unit.finish(self.flats), None
        self.alive = [StorageWeakRef(t.untyped_storage()) for t in whole]
        return whole

    @property
    def live(self) -> bool:
        """Whether memory of this use's gathered weights is still held by anyone."""
        return any(not s.expired() for s in self.alive)

    def prefetch(self) -> None:
        """In backward: begin to gather the unit that comes next, the last one before this whose backward needs its weights."""
        before = self.before
        while before is not None and not before.saved_any:
            before = before.before
        if before is not None:
            before.start()

    def weights(self) -> list[Tensor]:
        """All parameters of the unit, whole, connected to the shards for autograd."""
        out = list(self.shards)
        if self.unit.moved:
            for index, tensor in zip(self.unit.moved, _Gather.apply(self, *(self.shards[i] for i in self.unit.moved)), strict=True):
                out[index] = tensor
        return out

    def saved(self) -> Any:
        """Context in which to run the unit: autograd then keeps no gathered weight, backward gathers again."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: Tensor) -> Any:
        position = self.storages.get(t.untyped_storage()._cdata)
        if position is None:
            return t.detach()  # t itself may be the output of what saves it: each would keep the other alive for ever
        self.saved_any = True
        return position, t.size(), t.stride(), t.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.whole is None:
            self.whole = self.finish()
            self.prefetch()
        position, size, stride, offset = packed
        return self.whole[position].as_strided(size, stride, offset)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        whole = use.finish()
        if use.unit.reshard:
            use.storages = {t.untyped_storage()._cdata: i for i, t in enumerate(whole)}
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        use.whole = None
        use.prefetch()
        return None, *use.unit.reduce(grads)


def gather_traced(unit: Unit, shards: Sequence[Tensor]) -> list[Tensor]:
    """All parameters of the unit, whole, inside a compiled step; the compiler orders the collectives."""
    out = list(shards)
    if unit.moved:
        for index, tensor in zip(unit.moved, _TracedGather.apply(unit, *(shards[i] for i in unit.moved)), strict=True):
            out[index] = tensor
    return out


class _TracedGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: Unit, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        by_index: list[Any] = [None] * (max(unit.moved) + 1)
        for index, tensor in zip(unit.moved, shards, strict=True):
            by_index[index] = tensor
        return tuple(unit.finish(unit.start(by_index)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.unit.reduce(grads)
