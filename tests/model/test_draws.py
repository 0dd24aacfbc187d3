"""Draws: uniform, independent, and functions of nothing but their keys."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from model.context import Context
from model.draws import of_slots, uniform
from tests.model.token_rows import token_row

SALT = torch.tensor([12345.0])


def masks(ctx: Context, salt: Tensor = SALT, columns: int = 64) -> Tensor:
    return of_slots(salt, ctx, len(ctx.segments_T), columns)


def row(lengths: tuple[int, ...], draw: int = 5) -> Context:
    return dataclasses.replace(token_row(DecoderConfig(), lengths), draw=torch.tensor(draw))


def test_draws_depend_on_salt_row_and_place_and_on_nothing_else() -> None:
    once = masks(row((40, 24)))
    assert torch.equal(once, masks(row((40, 24))))
    for other in (masks(row((40, 24), draw=6)), masks(row((40, 24)), SALT + 1)):
        assert (once == other).float().mean() < 1e-3
    for rank in range(2):  # the second of two processes has the middle half of the row, the first the rest
        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        own = torch.cat([once[:16], once[48:]]) if rank == 0 else once[16:48]
        assert torch.equal(of_slots(SALT, dataclasses.replace(row((40, 24)), cp_group=group), 32, 64), own)


def test_draws_are_uniform_and_independent() -> None:
    u = masks(row((3000,)))
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 16, 0, 1) / u.numel()
    assert (counts - 1 / 16).abs().max() < 2e-3
    z = u - 0.5
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[1:, 1:], z[:-1, :-1]), (z, masks(row((3000,), draw=6)) - 0.5)):
        assert abs((a * b).mean() * 12) < 1e-2
    assert z.mean(0).abs().max() < 0.03
    assert z.mean(1).abs().max() < 0.2


def test_every_key_counts() -> None:
    keys = [torch.tensor(n) for n in (3, 4, 5)]
    found = {uniform(*keys).item(), uniform(*keys[::-1]).item(), uniform(*keys[:2]).item()}
    found |= {uniform(*(k + (i == j) for j, k in enumerate(keys))).item() for i in range(3)}
    assert len(found) == 6
    assert uniform(torch.arange(5)[:, None], torch.arange(7)[None]).unique().numel() == 35
