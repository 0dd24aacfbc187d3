"""Rows through the stages of a pipeline: hidden states travel forward and their gradients back, in the order of parallel/schedules.py.

Without a pipeline the one stage is the whole model and nothing travels, so that there is one way for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import broadcast
from parallel.gather import Shared
from parallel.mesh import Mesh
from parallel.pipeline import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Stage, next_stage
from training.engine import Pass
from training.halves import Later


class Part(NamedTuple):
    """What a stage has computed of a row."""

    run: Pass | None  # None in a graph of its own
    x_TD: Tensor | None  # its input
    y_TD: Tensor | None  # its output; None behind the last
    loss: Tensor | None  # its share of the loss; None without any


class Transfers:
    """Messages between the ranks of a pipeline about hidden states of one width; both ends must name them in the same order.

    :param places: the rank of each stage
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, places: Sequence[int]):
        self.mesh, self.width, self.dtype, self.places = mesh, width, dtype, places
        self.sent: list[tuple[Any, Tensor]] = []  # under way, with what must live until it has left

    def send(self, x_TD: Tensor, stage: int) -> None:
        """Begin to send to the rank of a stage."""
        x_TD = x_TD.detach().contiguous()
        self.sent = [(work, t) for work, t in self.sent if not work.is_completed()]
        self.sent.append((dist.isend(x_TD, group=self.mesh.pp_group, group_dst=self.places[stage]), x_TD))

    def receive(self, tokens: int, stage: int) -> Callable[[], Tensor]:
        """Begin to receive from the rank of a stage; what is returned waits for the message and gives it."""
        x_TD = torch.empty(tokens, self.width, dtype=self.dtype, device=self.mesh.device)
        work = dist.irecv(x_TD, group=self.mesh.pp_group, group_src=self.places[stage])
        assert work is not None

        def arrived() -> Tensor:
            work.wait()
            return x_TD

        return arrived

    def stays(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return self.places[stage] == self.mesh.pp_rank

    def finish(self) -> None:
        """Wait until all has left."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []


class StepWork:
    """Forward and backward of the rows of one step; adds up the gradients of this rank's shards and the figures.

    :param weights: trained shards of each stage
    :param part_of: (stage, row, input) -> its part and its figures
    """

    def __init__(self, rows: Sequence[dict[str, Tensor]], weights: dict[int, dict[str, Tensor]], shared: Shared,
                 part_of: Callable[[Stage, dict[str, Tensor], Tensor | None], tuple[Part, dict[str, Tensor]]]):
        self.rows, self.weights, self.shared, self.part_of = rows, weights, shared, part_of
        self.left = dict.fromkeys(weights, len(rows))  # backwards to come of each stage
        self.sums: dict[str, Tensor] = {}

    def forward(self, stage: Stage, row: int, x_TD: Tensor | None) -> Part:
        """A stage's part of a row, from the hidden states of the stage before."""
        if x_TD is not None and stage.learns_before:
            x_TD.requires_grad_()
        part, stats = self.part_of(stage, self.rows[row], x_TD)
        add_to(self.sums, {name: value.detach() for name, value in (stats | {"loss": part.loss}).items() if value is not None})
        return part

    def backward_inputs(self, stage: Stage, part: Part, dy_TD: Tensor | None) -> tuple[Tensor | None, Callable[[], object]]:
        """The gradient of a part's input, where an earlier stage wants it, and what is to be called later for those of its weights."""
        if part.x_TD is None or not stage.learns_before:
            return None, partial(self.backward, stage, part, dy_TD)
        assert part.run is not None
        if not part.run.halved:
            dx_TD = self.backward(stage, part, dy_TD)
            return dx_TD, lambda: None
        later = Later()
        with later.half(first=True):
            dx_TD, _ = part_gradients(stage, part, dy_TD, (), keep=True)
        part.run.let_go()
        return dx_TD, partial(self._backward_weights, stage, part, dy_TD, later)

    def _backward_weights(self, stage: Stage, part: Part, dy_TD: Tensor | None, later: Later) -> None:
        self.shared.inputs_done = True
        with later.half(first=False):
            self.backward(replace(stage, learns_before=False), part, dy_TD)
        self.shared.inputs_done = False

    def backward(self, stage: Stage, part: Part, dy_TD: Tensor | None) -> Tensor | None:
        """The gradient of a part's input, where an earlier stage wants it, from that of its output."""
        self.left[stage.index] -= 1
        self.shared.last = self.left[stage.index] == 0
        weights, sums = list(self.weights[stage.index].values()), self.shared.sums
        dx_TD, given = part_gradients(stage, part, dy_TD, weights, allow_unused=len(self.rows) > 1)
        found = list(given)
        del given
        while weights:  # one after the other, so that each goes before the next is added
            weight, grad = weights.pop(), found.pop()
            if grad is not None:  # it waits for the last row, or has been added to its sum
                sums[weight] = sums[weight] + grad if weight in sums else grad
        return dx_TD

    @property
    def grads(self) -> dict[str, Tensor]:
        """What has been added up, by name."""
        return {name: self.shared.sums[weight] for own in self.weights.values() for name, weight in own.items()}


def part_gradients(stage: Stage, part: Part, dy_TD: Tensor | None, weights: Sequence[Tensor], allow_unused: bool = False,
                   keep: bool = False) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of a part's input (None where no earlier stage wants it) and of its weights (None for those that are not used).

    :param keep: backward comes again
    """
    ends = [(t, grad) for t, grad in ((part.loss, None), (part.y_TD, dy_TD)) if t is not None and t.requires_grad]
    inputs = [part.x_TD] if part.x_TD is not None and stage.learns_before else []
    if not ends or not (inputs or weights):
        return None, [None] * len(weights)  # all of it is frozen
    outputs, grads = zip(*ends, strict=True)
    found = torch.autograd.grad(outputs, [*inputs, *weights], grads, allow_unused=allow_unused, retain_graph=keep)
    return (found[0] if inputs else None), found[len(inputs) :]


def add_to(total: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Add up by name."""
    total.update({name: total[name] + value if name in total else value for name, value in found.items()})


def own_tokens(mesh: Mesh, batch: dict[str, Tensor]) -> int:
    """The tokens of a row that this rank has between the layers."""
    return len(batch["tokens_T"]) // (mesh.sizes.cp * mesh.sizes.tp)


def hand_on(transfers: Transfers, own: Sequence[Stage], tokens: int, compute: Callable[[Stage, Tensor | None], Tensor]) -> Tensor | None:
    """A row through this rank's stages, forward alone: what `compute` gives of the last of all stages, None on the other ranks."""
    x_TD: Tensor | None = None
    for stage in own:
        if not stage.enters and not transfers.stays(stage.index - 1):
            x_TD = transfers.receive(tokens, stage.index - 1)()
        x_TD = compute(stage, x_TD)
        if not stage.ends and not transfers.stays(stage.index + 1):
            transfers.send(x_TD, stage.index + 1)
    return x_TD if own[-1].ends else None


def from_end(transfers: Transfers, x: Tensor) -> Tensor:
    """The tensor of the rank that has the last stage, written into that of every rank of the pipeline."""
    mesh = transfers.mesh
    return broadcast(x, mesh.pp_group, transfers.places[-1]) if mesh.sizes.pp > 1 else x


def carry_out(actions: Sequence[Action], stages: Sequence[Stage], tokens: Sequence[int], transfers: Transfers, work: StepWork) -> None:
    """A rank's actions of one step.

    :param stages: of all ranks
    :param tokens: that this rank has of each row
    """
    arriving: dict[tuple[str, int, int], Callable[[], Tensor]] = {}
    leaving: dict[tuple[str, int, int], Tensor] = {}
    held: dict[tuple[int, int], Part] = {}
    left: dict[tuple[int, int], Callable[[], object]] = {}  # what gives weights their gradients

    def hand_over(action: Action, x_TD: Tensor | None) -> None:
        if x_TD is not None and transfers.stays(next_stage(action)):
            arriving[action.way, next_stage(action), action.row] = x_TD.detach
        elif x_TD is not None:
            leaving[action.message] = x_TD

    for action in actions:
        kind, way, index, row = action
        wanted = way == FORWARD or (index + 1 < len(stages) and stages[index + 1].learns_before)
        if kind == "receive" and wanted:
            arriving[action.message] = transfers.receive(tokens[row], index + (1 if way == BACKWARD else -1))
        elif kind == "send" and action.message in leaving:
            transfers.send(leaving.pop(action.message), next_stage(action))
        elif kind == FORWARD:
            arrived = arriving.pop(action.message, None)
            part = held[index, row] = work.forward(stages[index], row, arrived() if arrived else None)
            hand_over(action, part.y_TD)
        elif kind in (BACKWARD, INPUTS):
            part, arrived = held.pop((index, row)), arriving.pop(action.message, None)
            if arrived and part.run and (kind == BACKWARD or stages[index].learns_before):  # else all of it comes later
                part.run.prepare_backward()
            dy_TD = arrived() if arrived else None
            if kind == BACKWARD:
                dx_TD = work.backward(stages[index], part, dy_TD)
            else:
                dx_TD, left[index, row] = work.backward_inputs(stages[index], part, dy_TD)
            del part
            hand_over(action, dx_TD)
        elif kind == WEIGHTS:
            left.pop((index, row))()
    transfers.finish()
