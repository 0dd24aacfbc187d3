"""Random numbers as pure functions of what they are for: no state, the same in recomputation and on any number of processes."""

import torch
from torch import Tensor

from model.audio_row import slot_positions
from model.context import Context
from parallel import sequence


def uniform(*keys: Tensor) -> Tensor:
    """fp32 in [0, 1), one for each element of the integer tensors `keys`, which are broadcast together; all keys count."""
    bits = torch.zeros_like(keys[0], dtype=torch.int64)
    for key in keys:
        bits = _mixed(bits ^ _mixed(key.long() + 1))
    return (bits >> 8).float() * 2.0**-24


def of_slots(salt: Tensor, ctx: Context, rows: int, columns: int, first: int = 0) -> Tensor:
    """fp32 [rows, columns] in [0, 1), a pure function of the salt (run seed and path), the row of the step and the place in it.

    The place is (utterance, position), so that it does not matter how a row is split over processes; of anything but the token row and the
    audio row, at any number of slots a frame, it is the number of the row.

    :param first: number of the first column
    """
    assert ctx.draw is not None
    slots = ctx.segments_T.long() * 65537 + ctx.positions_T
    place = sequence.own_slots(slots, ctx)
    if rows != len(place) and ctx.tp_group is not None and rows == len(place) // ctx.tp_group.size():
        place = sequence.own_tokens(slots, ctx)
    rate, rest = divmod(rows, max(1, len(ctx.audio_segments_A)))
    if rows != len(place) and rate and not rest:
        place = ctx.audio_segments_A.repeat_interleave(rate) * 65537 + slot_positions(rate, ctx)
    elif rows != len(place):
        place = torch.arange(rows, device=salt.device)
    column = torch.arange(first, first + columns, device=salt.device)
    return uniform(salt.long().view(1, 1), ctx.draw.view(1, 1), place[:, None], column[None])


def _mixed(x: Tensor) -> Tensor:
    """Numbers of 32 bits, each bit of which depends on all of x's lowest 32; int64, without overflow."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
