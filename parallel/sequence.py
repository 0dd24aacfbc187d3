"""Context parallelism: the slots of a packed row are split over the ranks of ctx.cp_group.

The row is cut into 2 cp equal chunks, of which rank r has chunks r and 2 cp - 1 - r: causal attention then costs every rank the same, for
one long document as for many short ones, and nothing is padded. With parallel.cp_split=document each document is cut so (DualChunkSwap);
its length must be a multiple of 2 cp. Attention gathers keys and values, or sends them round a ring (parallel/ring.py), and says which of
them each piece of a document sees. A recurrent layer exchanges tokens for heads, once on the way in and once on the way out. Within a
rank's slots the ranks of ctx.tp_group have their parts (parallel/tensor.py). Without a group every function is the plain one.
"""

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.lookup import permute
from model.context import Context
from parallel.collectives import all_gather_grad, all_to_all_grad
from parallel.ring import ring_attention


def own_slots(x_T: Tensor, ctx: Context) -> Tensor:
    """This rank's slots of something that has one entry a slot of the row."""
    if ctx.cp_group is None:
        return x_T
    if ctx.cp_split == "document":
        return x_T[places(ctx, ctx.cp_group.rank())]
    chunks = x_T.chunk(2 * ctx.cp_group.size())
    rank = ctx.cp_group.rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def own_tokens(x_T: Tensor, ctx: Context) -> Tensor:
    """Of these the ones that this rank has between the layers."""
    x_T = own_slots(x_T, ctx)
    return x_T if ctx.tp_group is None else x_T.chunk(ctx.tp_group.size())[ctx.tp_group.rank()]


def places(ctx: Context, rank: int) -> Tensor:
    """Where a rank's slots are in the row, in their order. [T / cp]"""
    assert ctx.cp_group is not None
    ranks = ctx.cp_group.size()
    if ctx.cp_split == "row":
        chunks = torch.arange(len(ctx.segments_T), device=ctx.segments_T.device).chunk(2 * ranks)
        return torch.cat((chunks[rank], chunks[-1 - rank]))
    slots_T = torch.arange(len(ctx.segments_T) // ranks, device=ctx.segments_T.device)
    starts_T, chunks_T = _documents(slots_T * ranks, ctx)
    offsets_T = slots_T - starts_T // ranks
    late_T = offsets_T >= chunks_T
    return starts_T + offsets_T + torch.where(late_T, 2 * ranks - 2 - rank, rank) * chunks_T


def _documents(slots_T: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """First slot of the document of each slot, and the length of its 2 cp chunks."""
    assert ctx.cp_group is not None
    ends_P = torch.cat((ctx.cu_seqlens_U1[1:], ctx.cu_seqlens_U1.new_full((1,), len(ctx.segments_T)))).long()
    documents_T = ctx.segments_T[slots_T].long()
    starts_T = ctx.cu_seqlens_U1.long()[documents_T]
    return starts_T, (ends_P[documents_T] - starts_T) // (2 * ctx.cp_group.size())


def _orders(ctx: Context) -> tuple[Tensor, Tensor]:
    """The slot of the row at each place in the order of ranks, and the inverse."""
    assert ctx.cp_group is not None
    ranks = ctx.cp_group.size()
    slots_T = torch.arange(len(ctx.segments_T), device=ctx.segments_T.device)
    starts_T, chunks_T = _documents(slots_T, ctx)
    offsets_T, lengths_T = slots_T - starts_T, chunks_T.clamp(min=1)
    numbers_T = offsets_T // lengths_T
    late_T = numbers_T >= ranks
    rank_T = torch.where(late_T, 2 * ranks - 1 - numbers_T, numbers_T)
    local_T = starts_T // ranks + late_T * chunks_T + offsets_T % lengths_T
    return torch.cat([places(ctx, rank) for rank in range(ranks)]), rank_T * (len(slots_T) // ranks) + local_T


def in_row_order(x_RT: Tensor, ctx: Context) -> Tensor:
    """[ranks, slots of each, ...] as [slots of the row, ...]."""
    if ctx.cp_split == "document":
        by_rank_T, by_row_T = _orders(ctx)
        return permute(x_RT.flatten(0, 1), by_row_T, by_rank_T)
    halves = x_RT.unflatten(1, (2, -1))
    return torch.cat((halves[:, 0], halves[:, 1].flip(0))).flatten(0, 1)


def in_rank_order(x_T: Tensor, ctx: Context) -> Tensor:
    """The inverse of in_row_order."""
    assert ctx.cp_group is not None
    ranks = ctx.cp_group.size()
    if ctx.cp_split == "document":
        return permute(x_T, *_orders(ctx)).unflatten(0, (ranks, -1))
    chunks = x_T.unflatten(0, (2 * ranks, -1))
    return torch.stack((chunks[:ranks], chunks[ranks:].flip(0)), 1).flatten(1, 2)


def tokens_to_heads(x_RTC: Tensor, ctx: Context) -> Tensor:
    """All slots of the row with this rank's columns, from this rank's slots with the columns of each rank in turn. [T, C]"""
    if ctx.cp_group is None:
        return x_RTC[0]
    return in_row_order(all_to_all_grad(x_RTC.contiguous(), ctx.cp_group), ctx)


def heads_to_tokens(y_TC: Tensor, ctx: Context) -> Tensor:
    """This rank's slots with the columns of all ranks, from all slots with its own. [T / cp, cp C]"""
    if ctx.cp_group is None:
        return y_TC
    y_RTC = all_to_all_grad(in_rank_order(y_TC, ctx).contiguous(), ctx.cp_group)
    return y_RTC.transpose(0, 1).flatten(1)


def attend(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, ctx: Context, window: int | None) -> Tensor:
    """Causal attention of this rank's slots to all slots of their documents before them. [T, N, H] like q"""
    if ctx.cp_group is None:
        return attention(q_TNH, k_TGH, v_TGH, ctx.cu_seqlens_U1, segments_T=ctx.segments_T, window=window)[0]
    ranks, (pieces_P1, segments_T, keys_2P) = ctx.cp_group.size(), pieces(ctx)
    if window is None and by_ring(q_TNH, k_TGH, ctx):
        ranges_R2P = torch.stack([torch.searchsorted(places(ctx, rank), keys_2P.long(), out_int32=True) for rank in range(ranks)])
        return ring_attention(q_TNH, k_TGH, v_TGH, pieces_P1, segments_T, ranges_R2P, ctx.cp_group)
    both = all_gather_grad(torch.stack((k_TGH, v_TGH), 1), ctx.cp_group).unflatten(0, (ranks, -1))
    k_SGH, v_SGH = in_row_order(both, ctx).unbind(1)
    return attention(q_TNH, k_SGH, v_SGH, pieces_P1, segments_T=segments_T, keys_2U=keys_2P, window=window)[0]


def by_ring(q_TNH: Tensor, k_TGH: Tensor, ctx: Context) -> bool:
    """Whether keys and values go round a ring instead of being gathered: where the gathered ones of other ranks would take more memory
    until backward than all else that the layer keeps (queries, what attention gives, input and norm)."""
    if ctx.cp_attention != "auto" or ctx.cp_group is None:
        return ctx.cp_attention == "ring"
    width = ctx.decoder.d_model // (1 if ctx.tp_group is None else ctx.tp_group.size())
    return (ctx.cp_group.size() - 1) * 2 * k_TGH[0].numel() > 2 * (q_TNH[0].numel() + width)


def pieces(ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces of documents that this rank has, as kernels.attention wants them: boundaries, number of each slot's piece, and the slots
    of the row that each piece sees, from its document's first to its own last."""
    return _pieces_of_documents(ctx) if ctx.cp_split == "document" else _pieces_of_the_row(ctx)


def _pieces_of_documents(ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """An early and a late chunk of every document, then of the padding, which sees nothing."""
    assert ctx.cp_group is not None
    ranks, rank = ctx.cp_group.size(), ctx.cp_group.rank()
    starts_P = ctx.cu_seqlens_U1
    ends_P = torch.cat((starts_P[1:], starts_P.new_full((1,), len(ctx.segments_T))))
    chunks_P = (ends_P - starts_P) // (2 * ranks)
    real_P = torch.arange(len(starts_P), device=starts_P.device) < len(starts_P) - 1
    halves_P2 = torch.stack((starts_P // ranks + chunks_P, ends_P // ranks), 1)
    lasts_P2 = starts_P[:, None] + torch.stack(((rank + 1) * chunks_P, (2 * ranks - rank) * chunks_P), 1) * real_P[:, None]
    slots_T = torch.arange(len(ctx.segments_T) // ranks, device=starts_P.device)
    documents_T = ctx.segments_T[slots_T * ranks]
    late_T = slots_T >= halves_P2[documents_T.long(), 0]
    keys_2P = torch.stack((starts_P.repeat_interleave(2), lasts_P2.flatten()))
    return torch.cat((starts_P.new_zeros(1), halves_P2.flatten())), 2 * documents_T + late_T.to(documents_T.dtype), keys_2P


def _pieces_of_the_row(ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """In each of two chunks U + 1 pieces, most of them empty: its part of every document, then padding, which sees nothing."""
    assert ctx.cp_group is not None
    ranks, rank = ctx.cp_group.size(), ctx.cp_group.rank()
    chunk = len(ctx.segments_T) // (2 * ranks)
    starts_P = ctx.cu_seqlens_U1  # of each document, then of the padding
    ends_P = torch.cat((starts_P[1:], starts_P.new_full((1,), len(ctx.segments_T))))
    boundaries, firsts, lasts = [starts_P.new_zeros(1)], [], []
    for number, place in enumerate((rank, 2 * ranks - 1 - rank)):
        low, high = place * chunk, (place + 1) * chunk
        piece_ends_P = ends_P.clamp(low, high)
        present_P = piece_ends_P > starts_P.clamp(low, high)
        boundaries.append(piece_ends_P - low + number * chunk)
        firsts.append(torch.where(present_P, starts_P, 0))
        lasts.append(torch.where(present_P, torch.minimum(piece_ends_P, starts_P[-1]), 0))
    segments_T = own_slots(ctx.segments_T, ctx)
    later_T = torch.arange(2 * chunk, device=segments_T.device) >= chunk
    keys_2P = torch.stack((torch.cat(firsts), torch.cat(lasts)))
    # the bounds of empty pieces only have to be in order
    return torch.cat(boundaries), segments_T + len(starts_P) * later_T.to(segments_T.dtype), keys_2P.cummax(1).values
