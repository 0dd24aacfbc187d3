"""The adapter to DeepEP on one process, with a package that has its signatures; tests.dist.matrix compares several ranks with one."""

import gc
import sys

import pytest
import torch
import torch.distributed as dist

from parallel import deepep
from parallel.mesh import start_processes
from tests.dist import deep_ep


@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_go_and_come_back(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    start_processes(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    ids_TK = torch.tensor([[0, 3], [4, 4], [2, 4], [1, 0]])  # 4 and more stand for none: token 1 stays where it is
    x_TD, weights_TK, probe_TD = torch.randn(4, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True), torch.randn(4, 8)

    def exchanged(x_TD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        x_RD, ids_RK, weights_RK, key = deepep.dispatch(x_TD, ids_TK, weights_TK, 4, group)
        y_RD = x_RD * (weights_RK * (ids_RK + 1)).sum(1, keepdim=True)  # of none: 0
        return deepep.combine(y_RD, key, 4, group)

    y_TD = (torch.compile(exchanged, fullgraph=True, backend="aot_eager") if compiled else exchanged)(x_TD, weights_TK)
    expected_TD = x_TD * (weights_TK * (ids_TK + 1) * (ids_TK < 4)).sum(1, keepdim=True)
    torch.testing.assert_close(y_TD, expected_TD)
    grads, references = (torch.autograd.grad((y * probe_TD).sum(), (x_TD, weights_TK)) for y in (y_TD, expected_TD))
    torch.testing.assert_close(grads, references)
    exchanged(x_TD, weights_TK)  # without a backward pass
    del y_TD
    gc.collect()
    assert not deepep._handles
    deepep.release()
    assert deepep._buffer.cache_info().currsize == 0
