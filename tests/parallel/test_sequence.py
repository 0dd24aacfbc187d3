"""How a row is split over context-parallel ranks, against the definition: which slots each has and which keys its queries see."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.attention.reference import _sees
from model.context import Context
from parallel import sequence
from tests.model.token_rows import token_row


def contexts(lengths: list[int], padding: int, ranks: int) -> list[Context]:
    """The view of each rank."""
    whole = token_row(DecoderConfig(), lengths, padding)
    groups: list[Any] = [SimpleNamespace(size=lambda: ranks, rank=lambda r=r: r) for r in range(ranks)]
    return [replace(whole, cp_group=group) for group in groups]


def rank_slots(slots: int, ranks: int, rank: int) -> Tensor:
    chunk = slots // (2 * ranks)
    first, second = torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk)
    return torch.cat((first, second))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_an_early_and_a_late_chunk(ranks: int) -> None:
    row = torch.arange(48)
    parts = [sequence.own_slots(row, ctx) for ctx in contexts([48], 0, ranks)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, rank_slots(48, ranks, rank))
    stacked = torch.stack(parts)
    assert torch.equal(sequence.in_row_order(stacked), row)
    assert torch.equal(sequence.in_rank_order(row, ranks), stacked)


def test_tokens_between_layers_are_the_tensor_parallel_part_of_the_slots() -> None:
    ctx = contexts([16], 0, 2)[1]
    tp: list[Any] = [SimpleNamespace(size=lambda: 2, rank=lambda r=r: r) for r in range(2)]
    assert sequence.own_tokens(torch.arange(16), replace(ctx, tp_group=tp[0])).tolist() == [4, 5, 6, 7]
    assert sequence.own_tokens(torch.arange(16), replace(ctx, tp_group=tp[1])).tolist() == [8, 9, 10, 11]
    assert sequence.own_tokens(torch.arange(16), replace(ctx, cp_group=None, tp_group=tp[1])).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(("lengths", "padding"), [
    ([1, 2, 3, 5, 7, 8, 9, 13], 0),
    ([1, 2, 3, 5, 7, 8, 9], 13),
    ([48], 0),
    ([1], 47),
    ([], 48),
    ([24, 24], 0),
    ([5, 30, 1], 12),
    ([1] * 48, 0),
])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slot_sees_its_document_up_to_itself(lengths: list[int], padding: int, ranks: int) -> None:
    slots = 48
    for rank, ctx in enumerate(contexts(lengths, padding, ranks)):
        boundaries, segments, keys = sequence.pieces(ctx)
        assert boundaries[0] == 0
        assert boundaries[-1] == slots // ranks == len(segments)
        assert (boundaries.diff() >= 0).all()
        assert (keys.diff(dim=1) >= 0).all()
        pieces = torch.bucketize(torch.arange(len(segments)), boundaries[1:], right=True)
        assert torch.equal(pieces.to(segments.dtype), segments)
        mine, row = rank_slots(slots, ranks, rank), torch.arange(slots)
        same = (ctx.segments_T[mine, None] == ctx.segments_T) & (ctx.segments_T[mine, None] < len(lengths))
        assert torch.equal(_sees(slots, boundaries, segments, keys, True, None), same & (row <= mine[:, None]))
        near = same & (row <= mine[:, None]) & (row > mine[:, None] - 4)
        assert torch.equal(_sees(slots, boundaries, segments, keys, True, 4), near)
