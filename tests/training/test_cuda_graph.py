"""A recorded step on a CPU: the operators of one step, done again on the same memory as a GPU would, against steps that run in full."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel import sharding
from parallel.mesh import make_mesh, start_processes
from tests.dist.first_worker import rows
from tests.training.test_step import LORA, SMALL
from training import config, optimizer
from training.cuda_graph import Recorded, Tensors
from training.state import State
from training.step import make_engine, make_state, make_step

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class Operators(TorchDispatchMode):
    """Keeps every operator that runs, with what it was given and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert func.name().partition(".")[0] not in WAITS, f"{func.name()} waits for a value"
        self.calls.append((func, args, kwargs or {}, [t for t in tree_leaves(out) if isinstance(t, Tensor)]))
        return out

    def again(self) -> None:
        """What runs is told no value anew: only memory carries from step to step."""
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, given in self.calls:
                found = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for old, new in zip(given, found, strict=True):
                    if old.data_ptr() != new.data_ptr():  # else a view, or written in place
                        old.copy_(new)


def recorder(state: State) -> Callable[[Callable[[], Tensors]], tuple[Callable[[], object], Tensors]]:
    """In the place of CUDA's, which records without doing: here the state is put back."""
    sharded = (state.params, state.first, state.second)
    kept = [*(t for tensors in sharded for t in sharding.local(tensors).values()), *state.buffers.values()]

    def record(work: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        before = [t.detach().clone() for t in kept]
        with Operators() as operators:
            metrics = work()
        with torch.no_grad():
            for t, value in zip(kept, before, strict=True):
                t.copy_(value)
        return operators.again, metrics

    return record


@pytest.mark.parametrize("more", [[], LORA])
def test_a_recorded_step_does_what_a_step_does(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their number (of which dropout is a function), the number of the update, the rate, moments and buffers change; two shapes."""
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, *more])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    monkeypatch.setattr(optimizer, "learning_rate", lambda step, *_: 2.0**-9 * (1 + step))  # exact in fp32 too
    wanted, state, engine = make_state(cfg, mesh), make_state(cfg, mesh), make_engine(cfg, mesh)
    whole = make_step(cfg, mesh, engine)
    cfg.compile.cuda_graph = True
    monkeypatch.setattr("training.step.Recorded", lambda work: Recorded(work, recorder(state)))
    recorded = make_step(cfg, mesh, engine)
    kept, figures = list(sharding.local(state.params).values()), []
    for number in range(6):
        given = rows(cfg, number)[: 1 + number % 2]  # one row and two in turns
        wanted, expected = whole(wanted, given)
        state, metrics = recorded(state, [{name: t.clone() for name, t in row.items()} for row in given])
        assert state.step == wanted.step == number + 1
        figures.append((metrics, expected))
    for number, (found, wanted_too) in enumerate(figures):  # also those of steps before
        assert found.keys() == wanted_too.keys()
        for name, value in wanted_too.items():
            assert torch.equal(found[name], value), (number, name)
    for mine, theirs in ((state.params, wanted.params), (state.first, wanted.first), (state.second, wanted.second)):
        for name, t in sharding.local(theirs).items():
            assert torch.equal(sharding.local(mine)[name], t), name
    for name, t in wanted.buffers.items():
        assert torch.equal(state.buffers[name], t), name
    assert all(a is b for a, b in zip(kept, sharding.local(state.params).values(), strict=True))
    with pytest.raises(RuntimeError, match="goes on with the state that the last one returned"):
        recorded(make_state(cfg, mesh), given)
