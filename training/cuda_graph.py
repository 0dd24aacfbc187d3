"""A step that a GPU's driver records once for each shape of its rows and then starts as a whole: the host only copies rows and two numbers.

What is recorded reads and writes the same memory every time. So parameters, moments and buffers stay where they are, and everything that
changes from step to step is a tensor: the rows with their numbers, the number of the update and the learning rate.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.state import State

Tensors = dict[str, Tensor]  # by name
# (state, rows, number of the update, learning rate) -> (buffers, metrics); parameters and moments are updated in place
Work = Callable[[State, Sequence[Tensors], int | Tensor, float | Tensor], tuple[Tensors, Tensors]]
Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], object], Tensors]]  # work -> (how to do it again, what it gives)


class Recording(NamedTuple):
    """Recorded work, and the memory that it reads and writes."""

    again: Callable[[], object]
    rows: list[Tensors]
    step: Tensor
    lr: Tensor
    metrics: Tensors


class Recorded:
    """`work`, recorded. The first step on rows of some shapes runs as it is, since compiling, loading libraries and connecting ranks cannot
    be recorded; the second is recorded.

    :param record: how; None: by CUDA
    """

    def __init__(self, work: Work, record: Record | None = None):
        self.work, self.record = work, record or CudaRecord()
        self.recordings: dict[object, Recording | None] = {}  # by the shapes of the rows; None: has run once
        self.params: Tensors | None = None  # that are updated

    def __call__(self, state: State, rows: Sequence[Tensors], step: int, lr: float) -> Tensors:
        """One update of the state's tensors, all of them in place.

        :raises RuntimeError: for another state than that of the first step, whose memory is recorded
        """
        if self.params is not None and self.params is not state.params:
            raise RuntimeError("a recorded step (compile.cuda_graph) goes on with the state that the last one returned; make another step")
        self.params = state.params
        shapes = tuple(tuple((name, t.shape) for name, t in sorted(row.items())) for row in rows)
        if shapes not in self.recordings:
            self.recordings[shapes] = None
            return self._update(state, rows, step, lr)
        recording = self.recordings[shapes] or self._new(state, rows)
        self.recordings[shapes] = recording
        for kept, row in zip(recording.rows, rows, strict=True):
            for name, t in row.items():
                kept[name].copy_(t)
        recording.step.fill_(step)
        recording.lr.fill_(lr)
        recording.again()
        return {name: value.clone() for name, value in recording.metrics.items()}  # the next one writes over it

    def _new(self, state: State, rows: Sequence[Tensors]) -> Recording:
        kept = [{name: t.clone() for name, t in row.items()} for row in rows]
        device = rows[0]["tokens_T"].device
        step, lr = torch.zeros((), device=device), torch.zeros((), device=device)  # in fp32, as CUDA's AdamW takes them
        again, metrics = self.record(lambda: self._update(state, kept, step, lr))
        return Recording(again, kept, step, lr, metrics)

    def _update(self, state: State, rows: Sequence[Tensors], step: int | Tensor, lr: float | Tensor) -> Tensors:
        buffers, metrics = self.work(state, rows, step, lr)
        for name, new in buffers.items():
            if new is not state.buffers[name]:
                state.buffers[name].copy_(new)
        return metrics


class CudaRecord:
    """Records what a GPU is given; all recordings share the memory of what they compute on the way, since they never run at once."""

    def __init__(self) -> None:
        self.pool: Any = None  # torch has no public name for its type

    def __call__(self, work: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # of this thread alone: the one that pins the memory of coming rows goes on meanwhile
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            metrics = work()
        return graph.replay, metrics
