"""Activation checkpointing: the same gradients from less memory, and what each policy computes a second time."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import Config
from model import speech_lm
from parallel.mesh import make_mesh, start_processes
from tests.dist.first_worker import rows
from tests.training.test_step import SMALL
from training import config
from training.recompute import kept, recomputed, within_budget
from training.state import init_state
from training.step import Gradients, make_engine, make_gradients

PATTERN = "ME*"  # the decoder of these tests
ENCODER_LAYERS = 2
ROWS = 2


class Counted(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def gradients(policy: str) -> tuple[Gradients, Counter[str], int]:
    """Gradients of a step of two rows, the operators that ran, and the bytes that layers handed to autograd to keep."""
    start_processes(torch.device("cpu"))
    cfg: Config = config.load([*SMALL, f"model.decoder.pattern={PATTERN}", f"train.activation_checkpointing={policy}",
                               f"train.activation_checkpointing_encoder={policy}"])[0]
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state, kept_bytes = init_state(speech_lm.spec(cfg), cfg.seed, mesh), [0]

    def keep(t: Tensor) -> Tensor:
        kept_bytes[0] += t.nbytes
        return t

    with Counted() as counted, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        found = make_gradients(cfg, mesh, make_engine(cfg, mesh))(state, rows(cfg, 0))
    return found, counted.calls, kept_bytes[0]


@pytest.fixture(scope="module")
def plain() -> tuple[Gradients, Counter[str], int]:
    return gradients("none")


@pytest.mark.parametrize(("policy", "runs"), [("selective", 1), ("full", 2)])
def test_the_same_gradients_and_what_runs_again(plain: tuple[Gradients, Counter[str], int], policy: str, runs: int) -> None:
    expected, before, most = plain
    got, calls, least = gradients(policy)
    assert got.grads.keys() == expected.grads.keys()
    assert all(torch.equal(got.grads[name], grad) for name, grad in expected.grads.items())
    assert all(torch.equal(got.sums[name], value) for name, value in expected.sums.items())
    assert least < most / 3
    assert calls["reedling::attention"] == runs * ROWS == runs * before["reedling::attention"]
    assert calls["reedling::relative_attention"] == runs * ROWS * ENCODER_LAYERS
    assert calls["reedling::experts"] == 2 * ROWS  # never stays; eagerly the operator itself runs again
    assert calls["aten::topk"] == before["aten::topk"] == ROWS  # a token's experts are chosen once


@pytest.mark.parametrize(("operator", "policies"), [
    (torch.ops.aten.topk.default, ("selective", "full", "0.5")), (torch.ops.aten.mm.default, ()),
    (torch.ops.reedling.experts.default, ()), (torch.ops.reedling.attention.default, ("selective", "0.5")),
    (torch.ops._c10d_functional.all_gather_into_tensor.default, ("selective", "0.5")),
    (torch.ops._c10d_functional.wait_tensor.default, ("selective", "0.5")),
    (torch.ops.reedling.hand_on.default, ("selective", "0.5")),
])
def test_what_stays(operator: Any, policies: tuple[str, ...]) -> None:
    assert tuple(policy for policy in ("selective", "full", "0.5") if kept(policy, operator)) == policies


def test_compiled_graphs_keep_inputs_and_choices_alone() -> None:
    """A function of a weight and an input: full keeps these two and the choice (two values and their places), none the products too."""
    def chosen(w: dict[str, Tensor], x_TD: Tensor) -> Tensor:
        h_TD = torch.sigmoid(x_TD @ w["in"])
        ids_TK = h_TD.detach().topk(2).indices
        return (torch.tanh(h_TD @ w["in"]) @ w["in"]).gather(1, ids_TK).exp()

    w, x_TD = {"in": torch.randn(32, 32, requires_grad=True)}, torch.randn(64, 32, requires_grad=True)
    results, sizes = [], []
    for policy in ("none", "full"):
        kept_numbers: list[int] = []
        compiled = torch.compile(chosen if policy == "none" else recomputed(chosen, policy), fullgraph=True, backend="aot_eager")
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_count, kept_numbers), lambda t: t):
            y = compiled(w, x_TD)
        results.append(torch.autograd.grad(y.sum(), (w["in"], x_TD)))
        sizes.append(sum(kept_numbers))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert sizes[1] == 32 * 32 + 64 * 32 + 64 * 2
    assert sizes[0] > 2 * sizes[1]


def test_a_share_is_between_none_and_full_and_no_choice_is_made_twice() -> None:
    def chosen(w: Tensor, x_TD: Tensor) -> Tensor:
        h_TD = torch.sigmoid(x_TD @ w)
        ids_TK = h_TD.detach().topk(2).indices
        for _ in range(6):
            h_TD = (h_TD @ w).exp() @ w
        return h_TD.gather(1, ids_TK)

    w, x_TD = (torch.randn(64, 64) * 0.01).requires_grad_(), torch.randn(64, 64, requires_grad=True)
    results, sizes, backward = [], [], []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backward.append({str(n.target) for n in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=compiler,
                           partition_fn=min_cut_rematerialization_partition)
    for policy in ("none", "0.5", "full"):
        kept_numbers: list[int] = []
        compiled = torch.compile(chosen if policy == "none" else recomputed(chosen, policy), fullgraph=True, backend=backend)
        if policy == "0.5":
            compiled = within_budget(compiled, 0.5)
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_count, kept_numbers), lambda t: t):
            y = compiled(w, x_TD)
        results.append(torch.autograd.grad(y.sum(), (w, x_TD)))
        sizes.append(sum(kept_numbers))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert sizes[0] > sizes[1] > sizes[2]
    assert len(backward) == 3
    assert not any("topk" in name for names in backward for name in names)


def _count(numbers: list[int], t: Tensor) -> Tensor:
    numbers.append(t.numel())
    return t
