"""Generation on two processes: the answers of one, each utterance once, with weights sharded, experts split and ranks ending apart."""

from tests.dist.generation_worker import transcripts
from tests.dist.launch import torchrun


def test_answers_are_those_of_one_process() -> None:
    alone = transcripts([])
    found = torchrun(2, "tests.dist.generation_worker", "parallel.ep=2")
    assert found["rows"] < alone["rows"]
    assert found["transcripts"] == alone["transcripts"]
    assert len({t["id"] for t in found["transcripts"]}) == len(found["transcripts"]) == 7
    assert len({t["hypothesis"] for t in found["transcripts"]}) > 3
