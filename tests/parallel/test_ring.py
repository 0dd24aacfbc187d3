"""Attention round a ring whose ranks are threads, against one attention over the whole row."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import attention
from parallel import ring, sequence
from tests.parallel.test_sequence import contexts


class Link:
    """A rank's group: a message goes into the next rank's box, and the next one may begin when all of it has been waited for."""

    def __init__(self, rank: int, boxes: list[Queue[list[Tensor]]]) -> None:
        self.number, self.boxes, self.expected = rank, boxes, 0

    def size(self) -> int:
        return len(self.boxes)

    def rank(self) -> int:
        return self.number

    def begin(self, parts: list[Tensor]) -> list[Any]:
        assert self.expected == 0
        assert all(part.numel() for part in parts)
        self.boxes[(self.number + 1) % len(self.boxes)].put([part.clone() for part in parts])
        self.expected, arrived = len(parts), Queue[Tensor]()
        return [(self, arrived)] * len(parts)

    def finish(self, arrived: Queue[Tensor]) -> Tensor:
        if arrived.empty():
            for part in self.boxes[self.number].get(timeout=60):
                arrived.put(part)
        self.expected -= 1
        return arrived.get()


@pytest.mark.parametrize(("split", "lengths", "ranks"), [("row", [5, 30, 1, 0], 4), ("row", [1, 47], 2), ("document", [8, 24, 0], 4)])
def test_one_message_at_a_time_brings_all_keys_and_gradients(monkeypatch: pytest.MonkeyPatch, split: str, lengths: list[int],
                                                             ranks: int) -> None:
    monkeypatch.setattr(ring, "hand_on_start", lambda parts, group: group.begin(parts))
    monkeypatch.setattr(ring, "wait", lambda handle: handle[0].finish(handle[1]))
    boxes = [Queue[list[Tensor]]() for _ in range(ranks)]
    views = [replace(ctx, cp_group=Link(rank, boxes), cp_attention="ring")  # type: ignore[arg-type]
             for rank, ctx in enumerate(contexts(lengths, 48 - sum(lengths), ranks, split))]
    q_TNH, k_TGH, v_TGH, dout_TNH = (torch.randn(48, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))

    def one(ctx: Any) -> list[Tensor]:
        own = [sequence.own_slots(t, ctx).clone().requires_grad_() for t in (q_TNH, k_TGH, v_TGH)]
        out_TNH = sequence.attend(own[0], own[1], own[2], ctx, None)
        return [out_TNH, *torch.autograd.grad(out_TNH, own, sequence.own_slots(dout_TNH, ctx))]

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, views))
    whole = [t.clone().requires_grad_() for t in (q_TNH, k_TGH, v_TGH)]
    out_TNH = attention(whole[0], whole[1], whole[2], views[0].cu_seqlens_U1, segments_T=views[0].segments_T, implementation="reference")[0]
    expected = [out_TNH, *torch.autograd.grad(out_TNH, whole, dout_TNH)]
    for ctx, results in zip(views, found, strict=True):
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got, sequence.own_slots(want, ctx), rtol=1e-12, atol=1e-13)
