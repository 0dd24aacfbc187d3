"""Ranks that share a row read it once: the first of them reads, and hands it on as raw tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from configs.schema import Config
from data.errors import DataError
from data.loader import make_loader
from parallel.collectives import broadcast, from_first_rank
from parallel.mesh import Mesh

Batch = dict[str, Any]
Layout = dict[str, tuple[torch.dtype, torch.Size]]


def training_batches(cfg: Config, mesh: Mesh, position: dict[str, Any] | None = None) -> Iterator[Batch]:
    """This rank's rows, without end.

    :param position: where an earlier run stopped reading
    """
    return read_once(lambda rank, world: make_loader(cfg.data, cfg.seed, rank, world, position, cfg.train.accumulate), mesh)


def read_once(read: Callable[[int, int], Iterable[Batch]], mesh: Mesh) -> Iterator[Batch]:
    """The batches of `read(data-parallel rank, their number)` on every rank that shares them, of which only the first calls it; where ranks
    share none, what it returns.

    What ends the reading there ends it on all of them, with the same sentence.
    """
    if mesh.row_group is None:
        return iter(read(mesh.dp_rank, mesh.dp))
    return _Shared(lambda: read(mesh.dp_rank, mesh.dp), mesh, mesh.row_group)


class _Shared:
    """One message a batch of what stays on the host, between the hosts; then all tensors as one buffer, between the devices."""

    def __init__(self, read: Callable[[], Iterable[Batch]], mesh: Mesh, group: ProcessGroup):
        self.mesh, self.group = mesh, group
        self.rows: Iterator[Batch] = iter(())  # of the rank that reads
        self.batch: Batch = {}

        def begin() -> None:
            self.rows = iter(read())

        self._first_does(begin)

    def __iter__(self) -> "_Shared":
        return self

    def __next__(self) -> Batch:
        told = self._first_does(self._read)
        if told is None:
            raise StopIteration
        layout, others = told
        return others | _unpacked(broadcast(self._buffer(layout), self.group), layout)

    def _read(self) -> tuple[Layout, Batch] | None:
        """What the others must know of the next batch; None after the last."""
        batch = next(self.rows, None)
        if batch is None:
            return None
        self.batch = batch
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        widest_first = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each begins at a multiple of its size
        return ({name: (tensors[name].dtype, tensors[name].shape) for name in widest_first},
                {name: value for name, value in batch.items() if name not in tensors})

    def _buffer(self, layout: Layout) -> Tensor:
        """All tensors as bytes on the device; on a rank that does not read, the room for them."""
        if self.group.rank() == 0:
            filled = [self.batch[name] for name in layout if self.batch[name].numel()]  # view refuses the strides of NumPy's empty arrays
            moved = [t.to(self.mesh.device, non_blocking=True) for t in filled]
            return torch.cat([t.reshape(-1).view(torch.uint8) for t in moved])
        size = sum(shape.numel() * dtype.itemsize for dtype, shape in layout.values())
        return torch.empty(size, dtype=torch.uint8, device=self.mesh.device)

    def _first_does(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on the first rank, on all; what it raises there is raised on all."""
        value, caught = None, None
        if self.group.rank() == 0:
            try:
                value = action()
            except Exception as error:
                caught = error
        sentence = None if caught is None else str(caught) if isinstance(caught, DataError) else f"{type(caught).__name__}: {caught}"
        value, sentence, mendable = from_first_rank((value, sentence, isinstance(caught, DataError)), self.mesh.row_hosts)
        if sentence is not None:
            raise (DataError if mendable else RuntimeError)(sentence) from caught
        return value


def _unpacked(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    parts = flat.split([shape.numel() * dtype.itemsize for dtype, shape in layout.values()])
    return {name: part.view(dtype).view(shape) for part, (name, (dtype, shape)) in zip(parts, layout.items(), strict=True)}
