"""Gradients on their way to their shards: each unit's are waited for when the backward of the next has run, beside which they travel."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.activation import widen
from parallel.collectives import all_reduce_start, reduce_scatter_start, wait


@dataclass
class Reduction:
    """One flat buffer, summed over the ranks with other shards and then over those with the same; a collective is under way."""

    flat: Tensor  # what the collective writes to
    total: Tensor  # where the sum will be, in fp32 or wider; the same memory where flat is that
    copies: ProcessGroup | None  # over which flat is still to be summed
    adds: Sequence[tuple[Tensor, Tensor]] = field(default_factory=list)  # sums of earlier rows, and the part of total that goes to each

    @classmethod
    def start(cls, flat: Tensor, shards: ProcessGroup | None, copies: ProcessGroup | None) -> "Reduction":
        """Begin, with the first of the groups; at least one there must be."""
        if shards is None:
            assert copies is not None
            flat, copies = all_reduce_start(flat, copies), None
        else:
            flat = reduce_scatter_start(flat, shards)
        wide = torch.promote_types(flat.dtype, torch.float32)
        return cls(flat, flat if flat.dtype == wide else torch.empty_like(flat, dtype=wide), copies)

    def advance(self) -> bool:
        """Wait for what is under way, and begin what comes next; False: nothing does, the sum is there."""
        wait(self.flat)
        if self.copies is not None:
            self.flat, self.copies = all_reduce_start(self.flat, self.copies), None
            return True
        if self.total is not self.flat:
            self.total.copy_(widen(self.flat))
        add(self.adds)
        return False


def add(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair its second."""
    if pairs:
        torch._foreach_add_([total for total, _ in pairs], [part for _, part in pairs])


def advance(under_way: list[Reduction]) -> None:
    """Wait for one collective of each; what is over leaves the list."""
    under_way[:] = [reduction for reduction in under_way if reduction.advance()]


def finish_with_backward(under_way: list[Reduction]) -> None:
    """Called in a backward pass: all of them are over when it is."""
    def finish() -> None:
        while under_way:
            advance(under_way)

    torch.autograd.Variable._execution_engine.queue_callback(finish)
