"""Collectives between steps, with one process; tests/dist runs them with several."""

import pytest
import torch

from parallel import collectives
from parallel.mesh import start_processes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def processes() -> None:
    start_processes(CPU)


@pytest.mark.parametrize("flag", [True, False])
def test_flags_of_one_rank(flag: bool) -> None:
    assert collectives.any_rank(flag, CPU) is flag
    assert collectives.every_rank(flag, CPU) is flag


def test_objects_of_one_rank() -> None:
    assert collectives.gather_objects({"a": 1}) == [{"a": 1}]
    assert collectives.from_first_rank("x") == "x"
