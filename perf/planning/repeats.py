"""Functions that do the same for every layer of a kind: they run once, and then their results and what was written down of them repeat."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Source:
    """Where a result lies: in the memory of an input, or in new memory of its own or of another result."""

    place: int
    given: bool
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, behind the beginning of the input or of the memory
    dtype: torch.dtype
    bytes: int  # of the memory

    def take(self, inputs: Sequence[Tensor], made: dict[int, Tensor]) -> Tensor:
        if self.given:
            whole = inputs[self.place]
            return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)
        if self.place not in made:
            made[self.place] = torch.empty(self.bytes // self.dtype.itemsize, dtype=self.dtype)
        return made[self.place].as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Recording:
    """One call of a function of tensors."""

    results: tuple[Source | None, ...]
    tree: TreeSpec
    events: tuple[Any, ...]
    storages: dict[int, tuple[bool, int]]  # that events name and that are an input's (True) or a result's, and its place
    transient_bytes: int


UNNAMED = count(-1, -1)  # names of memory that no tensor has


def shapes_of(inputs: Sequence[Any]) -> Hashable:
    """Equal for inputs that a function of shapes cannot tell apart."""
    return tuple((t.size(), t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in inputs)


def record(function: Callable[[], Any], inputs: Sequence[Any], events: list[Any], high: Callable[[], int]) -> tuple[Any, Recording | None]:
    """What a function returns, and the recording of it; None where a result looks at its input's memory as another type.

    :param events: to which the function appends
    :param high: the most bytes that there were during the call above those before it
    """
    inputs = [plain(t) for t in inputs]
    begun, given = len(events), {t.untyped_storage()._cdata: i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
    out = function()
    leaves, tree = tree_flatten(out)
    own: dict[int, int] = {}
    sources = [_source(plain(t), inputs, given, own) if isinstance(t, Tensor) else None for t in leaves]
    if any(s is not None and s.given and s.dtype != inputs[s.place].dtype for s in sources):
        return out, None
    storages = {storage: (True, i) for storage, i in given.items()} | {storage: (False, i) for storage, i in own.items()}
    return out, Recording(tuple(sources), tree, tuple(events[begun:]), storages, high())


def plain(t: Any) -> Any:
    """A tensor that a collective is going to fill, as any other."""
    return t.elem if isinstance(t, AsyncCollectiveTensor) else t


def _source(t: Tensor, inputs: Sequence[Any], given: dict[int, int], own: dict[int, int]) -> Source:
    storage = t.untyped_storage()
    if storage._cdata in given:
        place = given[storage._cdata]
        return Source(place, True, t.size(), t.stride(), t.storage_offset() - inputs[place].storage_offset(), t.dtype, 0)
    place = own.setdefault(storage._cdata, len(own))
    return Source(place, False, t.size(), t.stride(), int(t.storage_offset()), t.dtype, storage.nbytes())


def repeat(recording: Recording, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Results of the same shapes, and the same events about their memory."""
    inputs = [plain(t) for t in inputs]
    made: dict[int, Tensor] = {}
    leaves = [source and source.take(inputs, made) for source in recording.results]
    internal: dict[int, int] = {}

    def name(storage: int) -> int:
        if storage not in recording.storages:
            return internal.setdefault(storage, next(UNNAMED))
        given, place = recording.storages[storage]
        return int((inputs[place] if given else made[place]).untyped_storage()._cdata)

    events = [replace(e, storage=name(e.storage)) if hasattr(e, "storage") else e for e in recording.events]
    return tree_unflatten(leaves, recording.tree), events
