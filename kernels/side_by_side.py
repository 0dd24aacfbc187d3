"""Pieces of work on the cores of a CPU at once, each on one core.

PyTorch divides every operation among its threads and waits for all of them at its end, which costs small ones much: the experts of a
layer of 2,048 tokens take 0.8 times as long side by side in fp32 (two cores of an Intel Xeon). Pieces must spend their time in operations
of some tenths of a millisecond: between two, a thread may have to wait for Python's lock. Attention by groups of heads became slower.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def side_by_side(work: Callable[..., None], pieces: Sequence[tuple[Any, ...]], costs: Sequence[int]) -> None:
    """Calls work(*piece) of every piece, without gradients, as many at once as PyTorch has threads here.

    One after the other with all threads instead if one piece is so dear that the other threads would wait for it.

    :param pieces: none writes what another reads or writes
    :param costs: of each piece, in any unit
    """
    threads = torch.get_num_threads()
    if threads == 1 or max(costs, default=0) * threads > sum(costs):
        for piece in pieces:
            work(*piece)
        return
    left = iter(sorted(zip(costs, range(len(pieces)), strict=True), reverse=True))  # whoever asks next gets the dearest that is left

    def some() -> None:
        with torch.no_grad():
            for _, i in left:
                work(*pieces[i])

    running = [_pool(threads).submit(some) for _ in range(threads)]
    for one in running:
        one.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads of which each computes alone."""
    pool = ThreadPoolExecutor(threads, "side_by_side", initializer=_alone)
    # Tasks that wait for one another, so that all threads exist before the number is set back.
    ready = threading.Barrier(threads)
    for one in [pool.submit(ready.wait) for _ in range(threads)]:
        one.result()
    torch.set_num_threads(threads)
    return pool


def _alone() -> None:
    torch.get_num_threads()  # its first call in a thread takes over the number set last anywhere, and would undo the next line later
    torch.set_num_threads(1)
