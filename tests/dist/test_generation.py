"""Generation on two processes: the answers of one, each utterance once, with weights sharded, experts split and ranks ending apart."""

from typing import Any

import pytest

from tests.dist.generation_worker import transcripts
from tests.dist.launch import torchrun


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return transcripts([])


@pytest.mark.parametrize("layout", [["parallel.pp=2", "parallel.pp_chunks=2", "parallel.pp_schedule=zbv"],
                                    ["parallel.tp=2", "parallel.ep=2"]], ids=["pp", "tp and ep"])
def test_ranks_that_share_their_rows_answer_as_one_process(layout: list[str], alone: dict[str, Any]) -> None:
    assert torchrun(2, "tests.dist.generation_worker", *layout) == alone


def test_answers_are_those_of_one_process(alone: dict[str, Any]) -> None:
    found = torchrun(2, "tests.dist.generation_worker", "parallel.ep=2")
    assert found["rows"] < alone["rows"]
    assert found["transcripts"] == alone["transcripts"]
    assert len({t["id"] for t in found["transcripts"]}) == len(found["transcripts"]) == 7
    assert len({t["hypothesis"] for t in found["transcripts"]}) > 3
