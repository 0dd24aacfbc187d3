"""ZeRO for functions: a layer's sharded weights become whole for as long as the layer runs, and its gradients go back as shards.

All tensors of a layer that are sharded over the same group travel together: one all-gather in forward, one in backward (the gathered
weights are not kept in between), one reduce-scatter of the gradients, and where the shards have copies on other ranks one all-reduce of the
shards' gradients. Tensors that nothing needs to move or cast are passed as they are. What the zero stages below 3 keep is in `Shared`.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.activation import widen
from model.params import P
from parallel import sharding
from parallel.collectives import all_gather_start, all_reduce, reduce_scatter, wait
from parallel.mesh import Mesh
from parallel.offload import to_host
from parallel.reduction import Reduction, add, advance, finish_with_backward


@dataclass(frozen=True)
class Member:
    """One tensor's place in a flat buffer."""

    index: int  # position among the unit's parameters
    dim: int  # sharded dimension
    size: int  # its full length
    local: int  # this rank's share of it
    chunk_shape: tuple[int, ...]  # one rank's part, padded to the longest
    split: int = 0  # dimension of which the ranks have parts that are put together too, and its full length
    split_size: int = 0
    parts: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.chunk_shape)


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of a unit that are sharded over the same ranks, as one buffer a direction."""

    shards: ProcessGroup
    copies: ProcessGroup | None  # ranks with the same shard, among which its gradient is summed
    dtype: torch.dtype  # of the whole weights
    device: torch.device  # the same
    fetched: bool  # the shards are on the host
    sums: torch.dtype | None  # in which gradients travel and are added up; None: fp32 or wider
    reshard: bool  # whether the whole weights go after forward and come again in backward
    trained: bool  # frozen weights have no gradient
    members: tuple[Member, ...]

    @property
    def ranks(self) -> int:
        return self.shards.size()

    def start(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Begin to gather: one buffer, or where nothing has to travel the tensors themselves in the dtype of the whole ones."""
        if self.ranks > 1:
            return [all_gather_start(self.pack(shards), self.shards)]
        return [self.fetch(shards[m.index]) for m in self.members]

    def finish(self, begun: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, in the order of the members."""
        return self.unpack(wait(begun[0])) if self.ranks > 1 else [t.detach() for t in begun]

    def reduce(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards, in fp32 or wider, of the whole gradients summed over all ranks."""
        if self.ranks == 1 and self.copies is None:
            # of their own memory, in which later rows are added up
            own = [grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True) for grad in grads]
        else:
            flat = self.pack_grads(grads)
            if self.ranks > 1:
                flat = reduce_scatter(flat, self.shards)
            own = self.unpack_grads(widen(flat if self.copies is None else all_reduce(flat, self.copies)))
        return to_host(own) if self.fetched else own

    def reduce_start(self, grads: Sequence[Tensor], sums: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Reduction]]:
        """The same, whose numbers are there once what has begun is over; None for those that are added to a sum of earlier rows then."""
        begun: list[Reduction] = []
        if self.fetched or (self.ranks == 1 and self.copies is None):
            own = self.reduce(grads)
        else:
            begun = [Reduction.start(self.pack_grads(grads), self.shards if self.ranks > 1 else None, self.copies)]
            own = self.unpack_grads(begun[0].total)
        adds = [(total, part) for total, part in zip(sums, own, strict=True) if total is not None]
        if begun:
            begun[0].adds = adds
        else:
            add(adds)
        return [part if total is None else None for total, part in zip(sums, own, strict=True)], begun

    def pack(self, shards: Sequence[Tensor]) -> Tensor:
        """This rank's contribution to the all-gather: its (padded) parts one after the other, cast."""
        return torch.cat([_padded(self.fetch(shards[m.index]), m.chunk_shape).reshape(-1) for m in self.members])

    def fetch(self, shard: Tensor) -> Tensor:
        """On the device and in the dtype of the whole weights."""
        return shard.to(self.device, self.dtype, non_blocking=True, copy=self.fetched)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Whole tensors out of the gathered buffer."""
        rows, offset, whole = flat.view(self.ranks, -1), 0, []
        for m in self.members:
            part = rows[:, offset : offset + m.numel].view(self.ranks // m.parts, m.parts, *m.chunk_shape)
            part = part.movedim(0, m.dim + 1).flatten(m.dim + 1, m.dim + 2).narrow(m.dim + 1, 0, m.size)
            if m.parts > 1:
                part = part.movedim(0, m.split).flatten(m.split, m.split + 1).narrow(m.split, 0, m.split_size)[None]
            whole.append(part[0].contiguous())
            offset += m.numel
        return whole

    def pack_grads(self, grads: Sequence[Tensor]) -> Tensor:
        """Whole gradients as the buffer that reduce-scatter sums: rank r's parts in row r."""
        rows = []
        for m, grad in zip(self.members, grads, strict=True):
            missing = self.ranks * m.chunk_shape[m.dim] - m.size
            if missing:
                grad = F.pad(grad, [0, 0] * (grad.ndim - 1 - m.dim) + [0, missing])
            grad = widen(grad) if self.sums is None else grad.to(self.sums)
            rows.append(grad.unflatten(m.dim, (self.ranks, -1)).movedim(m.dim, 0).reshape(self.ranks, -1))
        return torch.cat(rows, 1).view(-1)

    def unpack_grads(self, flat: Tensor) -> list[Tensor]:
        """This rank's gradient shards out of the reduced buffer."""
        parts, offset = [], 0
        for m in self.members:
            part = flat[offset : offset + m.numel].view(m.chunk_shape)
            parts.append(part.narrow(m.dim, 0, m.local))
            offset += m.numel
        return parts


def _padded(t: Tensor, shape: Sequence[int]) -> Tensor:
    missing = [n for size, length in zip(reversed(shape), reversed(t.shape), strict=True) for n in (0, size - length)]
    return F.pad(t, missing) if any(missing) else t


@dataclass(frozen=True)
class Reshard:
    """Which gathered weights go after a layer's forward and come again in backward."""

    dense: bool = True
    experts: bool = True


class Unit:
    """The parameters that are gathered together, usually one layer, and how. Static; made once.

    :param together: also put together what is split over tp, for a pass without gradients whose every rank computes all
    :param sums: dtype in which gradients travel and are added up; None: fp32 or wider
    :param fetched: shards are on the host, and so are those of their gradients
    :param used_later: whether a unit that comes later has some of the same parameters
    """

    def __init__(self, leaves: Sequence[P], mesh: Mesh, dtype: torch.dtype, reshard: Reshard, together: bool = False,
                 sums: torch.dtype | None = None, fetched: bool = False, used_later: bool = False):
        self.used_later = used_later
        members: dict[Any, list[Member]] = {}
        groups: dict[Any, FlatGroup] = {}
        for index, p in enumerate(leaves):
            where = sharding.place(p, mesh)
            shards, copies = where.mesh.get_group(1), where.mesh.get_group(0) if where.copies > 1 else None
            if joined := together and where.mesh is mesh.tensor:
                shards = mesh.dense.get_group(1) if mesh.sizes.sharded else where.mesh.get_group(2)
            # the whole weight takes memory of its own
            copied = shards.size() > 1 or fetched or dtype not in (torch.float32, torch.float64)
            if p.kind == "buffer" or not (copied or copies):
                continue  # used as it is
            free = copied and (mesh.world > 1 or fetched) and (reshard.experts if "experts" in p.axes else reshard.dense)
            key = shards.group_name, copies and copies.group_name, free, p.trained  # meshes that share their ranks share a buffer
            groups[key] = FlatGroup(shards, copies, dtype, mesh.device, fetched, sums, free, p.trained, ())
            members.setdefault(key, []).append(_member(index, p, where, joined))
        self.groups = [replace(group, members=tuple(members[key])) for key, group in groups.items()]
        self.moved = [m.index for g in self.groups for m in g.members]  # order in which whole tensors come out
        self.trained = [g.trained for g in self.groups for _ in g.members]  # in the same order

    @property
    def reshard(self) -> bool:
        """Whether any weight is gathered a second time in backward."""
        return any(g.reshard for g in self.groups)

    def start(self, shards: Sequence[Tensor], again: bool = False) -> list[list[Tensor]]:
        """Begin to gather, by group; `again`: only what went after forward."""
        return [g.start(shards) if g.reshard or not again else [] for g in self.groups]

    def finish(self, begun: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
        """The whole tensors, in the order of `moved`; None where nothing was begun."""
        return [t for g, flats in zip(self.groups, begun, strict=True) for t in (g.finish(flats) if flats else [None] * len(g.members))]

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradient shards in the order of `moved` from whole gradients in the same order; None for frozen ones."""
        shards: list[Tensor | None] = []
        for g, whole in self._by_group(grads):
            shards += g.reduce(whole) if g.trained else [None] * len(g.members)
        return shards

    def reduce_start(self, grads: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Reduction]]:
        """The same, whose numbers are there once what has begun is over; None also for those that are added to their sums then."""
        shards: list[Tensor | None] = []
        under_way: list[Reduction] = []
        totals = iter(sums)
        for g, whole in self._by_group(grads):
            own = [total for _, total in zip(g.members, totals, strict=False)]
            if not g.trained:
                shards += [None] * len(g.members)
                continue
            parts, begun = g.reduce_start(whole, own)
            shards += parts
            under_way += begun
        return shards, under_way

    def _by_group(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[FlatGroup, list[Tensor]]]:
        parts = iter(grads)
        for g in self.groups:
            yield g, [t for _, t in zip(g.members, parts, strict=False) if t is not None]


def _member(index: int, p: P, where: sharding.Place, joined: bool) -> Member:
    shape, dim, ranks = list(sharding.local_shape(p, where)), where.dim, where.mesh.size(1)
    size = shape[dim]
    shape[dim] = math.ceil(size / ranks)
    member = Member(index, dim, size, sharding.chunk_bounds(size, ranks, where.mesh.get_local_rank(1))[1], tuple(shape))
    if not joined or where.split is None:
        return member
    parts = where.mesh.size(2)
    shape[where.split] = math.ceil(p.shape[where.split] / parts)
    return replace(member, chunk_shape=tuple(shape), split=where.split, split_size=p.shape[where.split], parts=parts)


@dataclass
class Shared:
    """What the micro-batches of one step share: weights that stay whole from its first to its last (zero stages 1 and 2), gradients that
    are reduced with those of the last one, and the sums of those that have been reduced."""

    holds: bool = False
    defers: bool = False
    last: bool = True  # whether this is the step's last micro-batch
    whole: dict[Unit, list[Tensor]] = field(default_factory=dict)
    pending: dict[Unit, list[Tensor | None]] = field(default_factory=dict)
    under_way: list[Reduction] = field(default_factory=list)
    inputs_done: bool = False  # backward is in its second half (see training.halves), which asks for no weight again
    sums: dict[Tensor, Tensor] = field(default_factory=dict)  # of gradient shards over the micro-batches so far, by the parameter's shard

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradient shards, whose numbers are there when the backward pass is over, or at once where a later unit has given some of the
        same; None for frozen parameters, for those with a sum, to which they are added a unit at a time, and for all while they wait for
        the last micro-batch.

        :param leaves: the parameters' shards
        """
        sums = [self.sums.get(leaf) for leaf in leaves]
        if not self.defers:
            return self._begin(unit, grads, sums)
        before = self.pending.pop(unit, [None] * len(grads))
        total = [g if g is None else widen(g) if b is None else b + g for b, g in zip(before, grads, strict=True)]
        if self.last:
            return self._begin(unit, total, sums)
        self.pending[unit] = total
        return [None] * len(total)

    def _begin(self, unit: Unit, grads: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        advance(self.under_way)
        shards, begun = unit.reduce_start(grads, sums)
        self.under_way += begun
        while self.under_way and unit.used_later:  # autograd adds what that unit gave
            advance(self.under_way)
        if self.under_way:
            finish_with_backward(self.under_way)
        return shards


class Use:
    """One use of a unit in one forward pass, and its second gathering in the backward pass.

    `before` is the use that ran earlier: while this unit's backward runs, that one's weights are already on their way.
    """

    def __init__(self, unit: Unit, shards: Sequence[Tensor], before: "Use | None" = None, shared: Shared | None = None):
        self.unit, self.shards, self.before, self.shared = unit, shards, before, shared or Shared()
        self.again = False  # whether forward is over
        self.begun: list[list[Tensor]] | None = None  # gathering under way
        self.whole: list[Tensor | None] | None = None  # gathered, in backward
        self.storages: dict[int, int] = {}  # storage of a whole tensor -> its position
        self.saved_any = False  # whether backward needs a whole tensor
        self.after: weakref.ref[Use] | None = None
        if before is not None:
            before.after = weakref.ref(self)
        self.alive: list[StorageWeakRef] = []

    def start(self) -> None:
        """Begin to gather, unless that has happened."""
        if self.begun is None and self.whole is None and self.unit not in self.shared.whole:
            with torch.no_grad():
                self.begun = self.unit.start(self.shards, self.again)
                self._watch(t for flats in self.begun for t in flats)

    def finish(self) -> list[Tensor | None]:
        """The whole tensors; starts the gathering if nobody has."""
        if self.unit in self.shared.whole:
            return [t.detach() for t in self.shared.whole[self.unit]]
        self.start()
        with torch.no_grad():
            assert self.begun is not None
            whole, self.begun = self.unit.finish(self.begun), None
        self.alive = []
        self._watch(t for t in whole if t is not None)
        return whole

    def _watch(self, tensors: Iterable[Tensor]) -> None:
        own = {s.untyped_storage()._cdata for s in self.shards}
        self.alive += [StorageWeakRef(t.untyped_storage()) for t in tensors if t.untyped_storage()._cdata not in own]

    @property
    def live(self) -> bool:
        """Whether memory of this use's gathered weights is still held by anyone."""
        return any(not s.expired() for s in self.alive)

    def prefetch(self) -> None:
        """In backward: begin to gather the unit that comes next, the last one before this whose backward needs its weights."""
        before = None if self.shared.inputs_done else self.before
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
        position, size, stride, offset = packed
        if self.shared.inputs_done:  # the function asks for what it has saved, and then uses none of it
            return self.shards[0].new_empty(()).expand(size)
        if self.whole is None:
            self._drop_later()
            self.whole = self.finish()
            self.prefetch()
        whole = self.whole[position]
        assert whole is not None
        return whole.as_strided(size, stride, offset)

    def _drop_later(self) -> None:
        """Let go of the unit whose backward came before: it has done so itself unless all its parameters are frozen."""
        later = None if self.after is None else self.after()
        if later is not None:
            later.whole = None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *shards: Tensor) -> tuple[Tensor | None, ...]:
        ctx.use = use
        whole, use.again = use.finish(), True
        freed = [g.reshard for g in use.unit.groups for _ in g.members]
        use.storages = {t.untyped_storage()._cdata: i for i, t in enumerate(whole) if freed[i] and t is not None}
        if use.shared.holds:
            use.shared.whole[use.unit] = [t.detach() for t in whole if t is not None]
        ctx.mark_non_differentiable(*(t for t, trained in zip(whole, use.unit.trained, strict=True) if not trained))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        use.whole = None
        use.prefetch()
        return None, *use.shared.reduce(use.unit, _without_frozen(use.unit, grads), [use.shards[i] for i in use.unit.moved])


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
        whole = [t for t in unit.finish(unit.start(by_index)) if t is not None]
        ctx.mark_non_differentiable(*(t for t, trained in zip(whole, unit.trained, strict=True) if not trained))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.unit.reduce(_without_frozen(ctx.unit, grads))


def _without_frozen(unit: Unit, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Autograd hands over zeros for what has no gradient."""
    return [grad if trained else None for grad, trained in zip(grads, unit.trained, strict=True)]
