"""What a rank of a pipeline does beside computing; the results are compared with one process in tests/dist."""

from typing import Any
from unittest import mock

import pytest
import torch

from parallel.pipeline import Action, Stage, compute
from training.pipeline import Part, carry_out


@pytest.mark.parametrize(("learns_before", "begun"), [(True, [True, True]), (False, [False, False])])
def test_weights_are_gathered_for_the_half_of_a_backward_that_reads_them(learns_before: bool, begun: list[bool]) -> None:
    """Before its gradient has come, for a stage whose input wants one; another's backward comes later, and gathers then."""
    stages = [Stage(0, range(1), ends=False), Stage(1, range(1, 2), False, False, learns_before), Stage(2, range(2, 3), False, True, True)]
    actions = [part for row in range(2) for part in (
        Action("receive", "forward", 1, row), compute("forward", 1, row), Action("send", "forward", 1, row),
        Action("receive", "backward", 1, row), compute("inputs", 1, row), compute("weights", 1, row))]
    runs, found = [mock.Mock(), mock.Mock()], list[bool]()
    transfers, work = mock.Mock(**{"stays.return_value": False, "receive.return_value": lambda: torch.ones(1)}), mock.Mock()

    def forward(stage: Stage, row: int, x_TD: Any) -> Part:
        return Part(runs[row], x_TD, torch.ones(1), None)

    def backward_inputs(stage: Stage, part: Part, dy_TD: Any) -> tuple[Any, Any]:
        found.append(part.run.prepare_backward.called)  # type: ignore[union-attr]
        return None, lambda: None

    work.forward, work.backward_inputs = forward, backward_inputs
    carry_out(actions, stages, [1, 1], transfers, work)
    assert found == begun
