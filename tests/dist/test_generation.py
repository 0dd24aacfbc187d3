"""Generation on two processes: the answers of one, each utterance once, with weights sharded, experts split and ranks ending apart."""

from typing import Any

import pytest

from tests.dist.generation_worker import transcripts
from tests.dist.launch import torchrun


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return transcripts([])


def test_stages_of_a_pipeline_answer_as_one_process(alone: dict[str, Any]) -> None:
    found = torchrun(2, "tests.dist.generation_worker", "parallel.pp=2", "parallel.pp_chunks=2", "parallel.pp_schedule=interleaved_1f1b")
    assert found == alone


def test_answers_are_those_of_one_process(alone: dict[str, Any]) -> None:
    found = torchrun(2, "tests.dist.generation_worker", "parallel.ep=2")
    assert found["rows"] < alone["rows"]
    assert found["transcripts"] == alone["transcripts"]
    assert len({t["id"] for t in found["transcripts"]}) == len(found["transcripts"]) == 7
    assert len({t["hypothesis"] for t in found["transcripts"]}) > 3
