"""Ranks that share a row: one of them reads, all have it, and what ends the reading ends it on all."""

from tests.dist.launch import torchrun
from tests.dist.rows_worker import BATCHES


def test_rows_are_read_once_and_errors_reach_every_rank() -> None:
    reader, other = torchrun(2, "tests.dist.rows_worker")
    for rank in (reader, other):
        assert rank["equal"] == [True] * BATCHES
    assert other["reads"] == 0
    assert reader["reads"] == BATCHES * 4  # one of the five times nothing could be opened
    sentences = [["DataError", "a.wav is empty; repair it"], ["DataError", "two utterances for three processes"],
                 ["DataError", "b.wav is too long"], ["RuntimeError", "KeyError: 'x'"]]
    for rank in (reader, other):
        assert [end[:2] for end in rank["ends"]] == sentences
