"""Tokens to experts and back through DeepEP's buffers (github.com/deepseek-ai/DeepEP): GPUs write into each other's memory.

A token travels once to each rank that has one of its experts. Both directions and their gradients are `Buffer.dispatch` and
`Buffer.combine`: what the one sends out, the other brings back and adds up. `dispatch_start` waits on the host for the number of tokens to
come, not for the tokens. Its handle, which says where they came from, stays in this process, under a number that travels through graphs as
a tensor.
"""

import functools
import importlib.util
import itertools
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _resolve_process_group

from parallel.collectives import wait

RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # for which DeepEP has a configuration
Dispatched = tuple[Tensor, Tensor, Tensor, Tensor]
_handles: dict[int, Any] = {}
_numbers = itertools.count()


def available() -> bool:
    """Whether the package is installed beside a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("deep_ep") is not None


@functools.cache
def _buffer(group_name: str, row_bytes: int) -> Any:
    """The buffer of a group for rows of so many bytes, made by all of its ranks at their first exchange."""
    from deep_ep import Buffer

    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    configs = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    return Buffer(group, max(c.get_nvl_buffer_size_hint(row_bytes, group.size()) for c in configs),
                  max(c.get_rdma_buffer_size_hint(row_bytes, group.size()) for c in configs))


def release() -> None:
    """Give all buffers back, which must happen before their groups are taken apart."""
    _buffer.cache_clear()


def _of(x: Tensor, group_name: str) -> Any:
    return _buffer(group_name, x.shape[1] * max(x.element_size(), 2))


def _keep(handle: Any) -> Tensor:
    """A number for the handle, which goes when the number does."""
    number = next(_numbers)
    _handles[number] = handle
    key = torch.tensor(number)
    weakref.finalize(key.untyped_storage(), _handles.pop, number)
    return key


class Begun(NamedTuple):
    """Tokens on their way here, and what was sent, whose gradients come back by the same way."""

    x_RD: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    key: Tensor
    x_TD: Tensor
    weights_TK: Tensor


def dispatch_start(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_experts: int, group: ProcessGroup) -> Begun:
    """Begin to send tokens to the ranks that have an expert of theirs. What is computed before `dispatch_wait` runs beside it, and in
    backward beside the way back: that begins at the place of `dispatch_wait` and is waited for here.

    :param ids_TK: int64; n_experts and more stand for none
    :param weights_TK: fp32
    """
    ids_TK = torch.where(ids_TK < n_experts, ids_TK, -1)
    return Begun(*_DispatchStart.apply(x_TD, ids_TK, weights_TK, n_experts, group.group_name))


def dispatch_wait(begun: Begun, group: ProcessGroup) -> Dispatched:
    """The tokens of all ranks that have an expert here: rows [R, D], numbers from this rank's first expert [R, K] (-1: none here), weights
    [R, K], and the key for `combine`."""
    x_RD, weights_RK = _DispatchWait.apply(begun.x_RD, begun.weights_RK, begun.key, begun.x_TD, begun.weights_TK, group.group_name)
    return x_RD, wait(begun.ids_RK), weights_RK, begun.key


def combine(y_RD: Tensor, key: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """The sum of what each token's rows have become. [T, D]"""
    return _combine_op(y_RD, key, tokens, group.group_name)


class _Transfer(Work):
    """What `wait` calls for tensors on their way. What is sent stays until then."""

    def __init__(self, event: Any, sent: tuple[Tensor, ...]):
        super().__init__()
        self.event, self.sent = event, sent

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.event.current_stream_wait()
        return True


def _under_way(received: tuple[Tensor, ...], event: Any, sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for t in received:
        _register_work(t, _Transfer(event, sent))
    return received


@torch.library.custom_op("reedling::deepep_dispatch", mutates_args=())
def _dispatch_op(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_experts: int,
                 group_name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    buffer = _of(x_TD, group_name)
    sent = x_TD.clone(), ids_TK.clone(), weights_TK.clone()  # a compiled graph may write into its own before they are sent
    per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(sent[1], n_experts)
    *received, _, handle, event = buffer.dispatch(
        sent[0], topk_idx=sent[1], topk_weights=sent[2], num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert, async_finish=True)
    return *_under_way(tuple(received), event, sent), _keep(handle)  # type: ignore[return-value]


@torch.library.custom_op("reedling::deepep_combine", mutates_args=())
def _combine_op(y_RD: Tensor, key: Tensor, tokens: int, group_name: str) -> Tensor:
    return _of(y_RD, group_name).combine(y_RD, _handles[int(key)])[0]


@torch.library.custom_op("reedling::deepep_dispatch_backward", mutates_args=())
def _dispatch_backward_op(dx_RD: Tensor, dweights_RK: Tensor, key: Tensor, tokens: int, group_name: str) -> tuple[Tensor, Tensor]:
    sent = dx_RD.clone(), dweights_RK.clone()  # as above
    *received, event = _of(dx_RD, group_name).combine(sent[0], _handles[int(key)], topk_weights=sent[1], async_finish=True)
    return _under_way(tuple(received), event, sent)  # type: ignore[return-value]


@torch.library.custom_op("reedling::deepep_combine_backward", mutates_args=())
def _combine_backward_op(dy_TD: Tensor, key: Tensor, rows: int, group_name: str) -> Tensor:
    return _of(dy_TD, group_name).dispatch(dy_TD, handle=_handles[int(key)])[0]


@_dispatch_op.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_experts: int, group_name: str) -> Dispatched:
    rows = torch.library.get_ctx().new_dynamic_size()
    received = (t.new_empty(rows, t.shape[1]) for t in (x_TD, ids_TK, weights_TK))
    return *received, torch.empty((), dtype=torch.int64, device="cpu")  # type: ignore[return-value]


@_combine_op.register_fake
def _(y_RD: Tensor, key: Tensor, tokens: int, group_name: str) -> Tensor:
    return y_RD.new_empty(tokens, y_RD.shape[1])


@_dispatch_backward_op.register_fake
def _(dx_RD: Tensor, dweights_RK: Tensor, key: Tensor, tokens: int, group_name: str) -> tuple[Tensor, Tensor]:
    return dx_RD.new_empty(tokens, dx_RD.shape[1]), dweights_RK.new_empty(tokens, dweights_RK.shape[1])


@_combine_backward_op.register_fake
def _(dy_TD: Tensor, key: Tensor, rows: int, group_name: str) -> Tensor:
    return dy_TD.new_empty(rows, dy_TD.shape[1])


class _DispatchStart(torch.autograd.Function):
    """What is under way, and x and weights themselves, whose gradients have the shapes of what comes back."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, n_experts: int, group_name: str) -> tuple[Tensor, ...]:
        begun = _dispatch_op(x_TD, ids_TK, weights_TK, n_experts, group_name)
        ctx.mark_non_differentiable(*begun)
        ctx.set_materialize_grads(False)
        return *begun, x_TD.view_as(x_TD), weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, x: None, ids: None, weights: None, key: None, dx_TD: Tensor, dweights_TK: Tensor) -> Any:
        return wait(dx_TD), None, wait(dweights_TK), None, None


class _DispatchWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_RK: Tensor, key: Tensor, x_TD: Tensor, weights_TK: Tensor,
                group_name: str) -> tuple[Tensor, Tensor]:
        ctx.tokens, ctx.group_name = len(x_TD), group_name
        ctx.save_for_backward(key)
        return wait(x_RD), wait(weights_RK)

    @staticmethod
    def backward(ctx: Any, dx_RD: Tensor, dweights_RK: Tensor) -> Any:
        begun = _dispatch_backward_op(dx_RD.contiguous(), dweights_RK.contiguous(), *ctx.saved_tensors, ctx.tokens, ctx.group_name)
        return None, None, None, *begun, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows, ctx.group_name = inputs[0].shape[0], inputs[3]
    ctx.save_for_backward(inputs[1])


def _backward_combine(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    return _combine_backward_op(dy_TD.contiguous(), *ctx.saved_tensors, ctx.rows, ctx.group_name), None, None, None


_combine_op.register_autograd(_backward_combine, setup_context=_save_combine)
