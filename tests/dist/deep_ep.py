"""Stands for the package deep_ep: its documented signatures, for tensors of any dtype over any backend of torch.distributed."""

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
                 topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, Any]:
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
        local = self._send(topk_idx, handle) - self.group.rank() * own
        here = (local >= 0) & (local < own)
        weights = torch.where(here, self._send(topk_weights, handle), 0)
        counts = torch.bincount(local[here], minlength=own).tolist()
        return self._send(x, handle), torch.where(here, local, -1), weights, counts, handle, SimpleNamespace()

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        return self._back(x, handle), None if topk_weights is None else self._back(topk_weights, handle), SimpleNamespace()

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
