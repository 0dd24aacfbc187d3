"""Ranks that share a row: one of them reads, all have it, and what ends the reading ends it on all."""

from tests.dist.launch import torchrun
from tests.dist.rows_worker import BATCHES


def test_rows_are_read_once_and_errors_reach_every_rank() -> None:
    *readers, third, fourth = ranks = torchrun(4, "tests.dist.rows_worker")  # one reads for a pipeline, and each pipeline has its own rows
    for rank in ranks:
        assert rank["equal"] == [True] * BATCHES
    assert third["reads"] == fourth["reads"] == 0
    assert [reader["reads"] for reader in readers] == [BATCHES * 4] * 2  # one of the five times nothing could be opened
    sentences = [["DataError", "a.wav is empty; repair it"], ["DataError", "two utterances for three processes"],
                 ["DataError", "b.wav is too long"], ["RuntimeError", "KeyError: 'x'"]]
    for rank in ranks:
        assert [end[:2] for end in rank["ends"]] == sentences
