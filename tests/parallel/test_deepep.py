"""The adapter to DeepEP on one process, with a package that has its signatures; tests.dist.matrix compares several ranks with one."""

import gc
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import deepep, expert
from parallel.mesh import start_processes
from tests.dist import deep_ep


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_tokens_go_and_come_back(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    start_processes(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    ids_TK = torch.tensor([[0, 3], [4, 4], [2, 4], [1, 0]])  # 4 and more stand for none: token 1 stays where it is
    x_TD, weights_TK, probe_TD = torch.randn(4, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True), torch.randn(4, 8)

    def experts(x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        return x_RD * (weights_RK * (ids_RK + 1)).sum(1, keepdim=True)  # of none: 0

    def exchanged(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        sent_TD = 2 * x_TD  # what is computed beside could be written in its place
        y_TD, own_TD = expert.routed(experts, sent_TD, ids_TK, weights_TK, 4, group, "deepep", lambda: torch.sin(sent_TD))
        return y_TD + own_TD

    y_TD = (exchanged if backend == "eager" else torch.compile(exchanged, fullgraph=True, backend=backend))(x_TD, weights_TK)
    expected_TD = 2 * x_TD * (weights_TK * (ids_TK + 1) * (ids_TK < 4)).sum(1, keepdim=True) + torch.sin(2 * x_TD)
    torch.testing.assert_close(y_TD, expected_TD)
    grads, references = (torch.autograd.grad((y * probe_TD).sum(), (x_TD, weights_TK)) for y in (y_TD, expected_TD))
    torch.testing.assert_close(grads, references)
    exchanged(x_TD, weights_TK)  # without a backward pass
    del y_TD
    gc.collect()
    assert not deepep._handles
    deepep.release()
    assert deepep._buffer.cache_info().currsize == 0


def test_what_is_computed_beside_begins_after_and_ends_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    start_processes(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    events: list[str] = []
    for name in ("dispatch", "combine"):
        monkeypatch.setattr(deep_ep.Buffer, name, _noted(events, getattr(deep_ep.Buffer, name)))
    monkeypatch.setattr(deep_ep.Event, "current_stream_wait", _noted(events, deep_ep.Event.current_stream_wait))
    x_TD, weights_TK = torch.randn(4, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    ids_TK = torch.zeros(4, 2, dtype=torch.int64)
    y_TD, own_TD = expert.routed(lambda x, ids, weights: x * weights.sum(1, keepdim=True), x_TD, ids_TK, weights_TK, 1, group, "deepep",
                                 lambda: _Beside.apply(x_TD, events))
    forward = [name for name, _ in groupby(events)]
    events.clear()
    (y_TD + own_TD).sum().backward()
    assert (forward, [name for name, _ in groupby(events)]) == (
        ["dispatch", "beside", "current_stream_wait", "combine", "current_stream_wait"],
        ["dispatch", "combine", "beside", "current_stream_wait"])
    deepep.release()


def _noted(events: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        events.append(function.__name__)
        return function(*arguments, **options)
    return noted


class _Beside(torch.autograd.Function):
    """Says when it is called, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("beside")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.events.append("beside")
        return 2 * grad, None
