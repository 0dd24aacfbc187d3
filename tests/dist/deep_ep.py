"""Stands for the package deep_ep: its documented signatures, for tensors of any dtype over any backend of torch.distributed.

With async_finish nothing is read or sent before the event is waited for: until then the results are -7.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    """Sizes of buffers, which nothing here needs."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Event:
    """A transfer from `read()` into each of `results`, which happens once, at the first wait."""

    def __init__(self, results: list[Tensor], read: Callable[[], list[Tensor]]):
        self.results, self.read, self.done = results, read, False
        for t in results:
            t.fill_(-7)

    def current_stream_wait(self) -> None:
        if not self.done:
            self.done = True
            for t, value in zip(self.results, self.read(), strict=True):
                t.data.copy_(value)  # as a stream does: autograd does not see it


class Buffer:
    """Dispatch and combine of the high-throughput kernels. A handle is (tokens, token of each row sent, rows sent, rows received)."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        assert num_nvl_bytes > 0
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        assert topk_idx.dtype == torch.int64
        assert int(topk_idx.max()) < num_experts
        own = num_experts // self.group.size()
        rank = torch.where(topk_idx < 0, -1, topk_idx // own)
        is_token_in_rank = (rank[..., None] == torch.arange(self.group.size())).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_token_in_rank.sum(0).int(), None, per_expert, is_token_in_rank, SimpleNamespace()

    def dispatch(self, x: Tensor, handle: Any = None, num_tokens_per_rank: Tensor | None = None, num_tokens_per_rdma_rank: Tensor | None = None,
                 is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
                 topk_weights: Tensor | None = None, async_finish: bool = False,
                 ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, Any]:
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return self._send(x, handle), None, None, None, None, SimpleNamespace()
        assert is_token_in_rank is not None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype in (torch.float32, torch.float64)
        sent = num_tokens_per_rank.tolist()
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        handle = len(x), is_token_in_rank.t().nonzero()[:, 1], sent, received.tolist()
        own = len(num_tokens_per_expert) // self.group.size()

        def read() -> list[Tensor]:
            local = self._send(topk_idx, handle) - self.group.rank() * own
            here = (local >= 0) & (local < own)
            return [self._send(x, handle), torch.where(here, local, -1), torch.where(here, self._send(topk_weights, handle), 0)]

        results, event = self._given([t.new_empty(sum(handle[3]), t.shape[1]) for t in (x, topk_idx, topk_weights)], read, async_finish)
        return *results, None, handle, event

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None,
                async_finish: bool = False) -> tuple[Tensor, Tensor | None, Any]:
        sent = [x] if topk_weights is None else [x, topk_weights]
        results, event = self._given([t.new_empty(handle[0], t.shape[1]) for t in sent], lambda: [self._back(t, handle) for t in sent],
                                     async_finish)
        return results[0], results[1] if len(results) > 1 else None, event

    @staticmethod
    def _given(results: list[Tensor], read: Callable[[], list[Tensor]], async_finish: bool) -> tuple[list[Tensor], Event]:
        event = Event(results, read)
        if not async_finish:
            event.current_stream_wait()
        return results, event

    def _send(self, x: Tensor, handle: Any) -> Tensor:
        _, token, sent, received = handle
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x[token], received, sent, group=self.group)
        return out

    def _back(self, x: Tensor, handle: Any) -> Tensor:
        tokens, token, sent, received = handle
        assert len(x) == sum(received)
        rows = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(rows, x.contiguous(), sent, received, group=self.group)
        return x.new_zeros(tokens, x.shape[1]).index_add(0, token, rows)
