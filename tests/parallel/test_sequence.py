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


def contexts(lengths: list[int], padding: int, ranks: int, split: str = "row") -> list[Context]:
    """The view of each rank."""
    whole = replace(token_row(DecoderConfig(), lengths, padding), cp_split=split)
    groups: list[Any] = [SimpleNamespace(size=lambda: ranks, rank=lambda r=r: r) for r in range(ranks)]
    return [replace(whole, cp_group=group) for group in groups]


def rank_slots(slots: int, ranks: int, rank: int) -> Tensor:
    chunk = slots // (2 * ranks)
    first, second = torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk)
    return torch.cat((first, second))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_an_early_and_a_late_chunk(ranks: int) -> None:
    row = torch.arange(48)
    views = contexts([48], 0, ranks)
    parts = [sequence.own_slots(row, ctx) for ctx in views]
    for rank, part in enumerate(parts):
        assert torch.equal(part, rank_slots(48, ranks, rank))
    stacked = torch.stack(parts)
    assert torch.equal(sequence.in_row_order(stacked, views[0]), row)
    assert torch.equal(sequence.in_rank_order(row, views[0]), stacked)


@pytest.mark.parametrize(("lengths", "padding", "ranks", "slots"), [  # as TransformerEngine cuts them
    ([12, 8], 0, 2, ["0,1,2,9,10,11,12,13,18,19", "3,4,5,6,7,8,14,15,16,17"]),
    ([16, 8, 24], 0, 4, ["0,1,14,15,16,23,24,25,26,45,46,47", "2,3,12,13,17,22,27,28,29,42,43,44",
                         "4,5,10,11,18,21,30,31,32,39,40,41", "6,7,8,9,19,20,33,34,35,36,37,38"]),
    ([4, 0, 4], 4, 2, ["0,3,4,7,8,11", "1,2,5,6,9,10"]),
])
def test_documents_are_cut_alike(lengths: list[int], padding: int, ranks: int, slots: list[str]) -> None:
    views, row = contexts(lengths, padding, ranks, "document"), torch.arange(sum(lengths) + padding)
    parts = [sequence.own_slots(row, ctx) for ctx in views]
    assert [part.tolist() for part in parts] == [[int(slot) for slot in part.split(",")] for part in slots]
    stacked = torch.stack(parts)
    assert torch.equal(sequence.in_row_order(stacked, views[0]), row)
    assert torch.equal(sequence.in_rank_order(row, views[0]), stacked)
    x_RT, y_T = stacked.double().requires_grad_(), row.double().requires_grad_()
    (dx_RT,) = torch.autograd.grad((sequence.in_row_order(x_RT, views[0]) * row).sum(), x_RT)
    (dy_T,) = torch.autograd.grad((sequence.in_rank_order(y_T, views[0]) * stacked).sum(), y_T)
    assert torch.equal(dx_RT, stacked.double())
    assert torch.equal(dy_T, row.double())


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
    check_pieces(contexts(lengths, padding, ranks), lengths)


@pytest.mark.parametrize(("lengths", "padding"), [([8, 16, 8], 16), ([48], 0), ([], 48), ([8, 0, 0, 40], 0), ([8] * 6, 0)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slot_sees_its_document_where_documents_are_cut(lengths: list[int], padding: int, ranks: int) -> None:
    check_pieces(contexts(lengths, padding, ranks, "document"), lengths)


@pytest.mark.parametrize(("heads", "groups", "width", "ranks", "tp", "expected"), [
    (32, 2, 2688, 8, 1, False), (32, 2, 2688, 32, 1, True),  # Nemotron-3-Nano's: 7 and 31 times 256 numbers against 4096 + 2688
    (32, 32, 4096, 2, 1, False), (32, 32, 4096, 4, 1, True),
    (8, 8, 1024, 2, 1, False), (8, 8, 1024, 4, 1, True), (4, 4, 1024, 4, 2, True),
])
def test_what_keeps_less_memory_is_chosen(heads: int, groups: int, width: int, ranks: int, tp: int, expected: bool) -> None:
    group: Any = SimpleNamespace(size=lambda: tp)
    ctx = replace(contexts([4 * ranks], 0, ranks)[0], decoder=DecoderConfig(d_model=width), tp_group=group if tp > 1 else None)
    q, k = torch.empty(4, heads, 128), torch.empty(4, groups, 128)
    assert sequence.by_ring(q, k, ctx) is expected
    assert sequence.by_ring(q, k, replace(ctx, cp_attention="ring"))
    assert not sequence.by_ring(q, k, replace(ctx, cp_attention="gather"))


@pytest.mark.parametrize(("split", "lengths"), [("row", [5, 30, 1]), ("document", [8, 24, 0])])
def test_each_rank_hands_on_the_keys_of_its_own_slots(split: str, lengths: list[int]) -> None:
    views = contexts(lengths, 48 - sum(lengths), 4, split)
    row = torch.arange(48)
    for rank, ctx in enumerate(views):
        where = sequence.places(ctx, rank)
        assert torch.equal(where, sequence.own_slots(row, ctx))
        assert (where.diff() > 0).all()  # so that a range of the row is a range of the rank's


def check_pieces(views: list[Context], lengths: list[int]) -> None:
    slots, ranks = 48, len(views)
    for ctx in views:
        boundaries, segments, keys = sequence.pieces(ctx)
        assert boundaries[0] == 0
        assert boundaries[-1] == slots // ranks == len(segments)
        assert (boundaries.diff() >= 0).all()
        assert (keys.diff(dim=1) >= 0).all()
        pieces = torch.bucketize(torch.arange(len(segments)), boundaries[1:], right=True)
        assert torch.equal(pieces.to(segments.dtype), segments)
        row = torch.arange(slots)
        mine = sequence.own_slots(row, ctx)
        same = (ctx.segments_T[mine, None] == ctx.segments_T) & (ctx.segments_T[mine, None] < len(lengths))
        assert torch.equal(_sees(slots, boundaries, segments, keys, True, None), same & (row <= mine[:, None]))
        near = same & (row <= mine[:, None]) & (row > mine[:, None] - 4)
        assert torch.equal(_sees(slots, boundaries, segments, keys, True, 4), near)
