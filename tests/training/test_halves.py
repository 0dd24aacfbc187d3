"""Backward in halves: the gradients of inputs first, those of weights later, each operator once."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx import GraphModule

from kernels.experts import experts
from training import halves
from training.halves import Later

Weights = dict[str, Tensor]


def mlp(w: Weights, x_TD: Tensor) -> Tensor:
    return torch.relu(x_TD * w["scale_D"] @ w["up_FD"].t()) @ w["down_DF"].t() + x_TD


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def weights(seed: int) -> Weights:
    return {"scale_D": draw(6, seed=seed), "up_FD": draw(10, 6, seed=seed + 1), "down_DF": draw(6, 10, seed=seed + 2)}


def whole(layer: Callable[[Weights, Tensor], Tensor], layers: Sequence[Weights], x_TD: Tensor, dy_TD: Tensor) -> tuple[Tensor, ...]:
    y_TD = x_TD
    for w in layers:
        y_TD = layer(w, y_TD)
    return torch.autograd.grad(y_TD, [x_TD, *(t for w in layers for t in w.values())], dy_TD)


@pytest.fixture
def _kept() -> Any:
    with torch._functorch.config.patch(donated_buffer=False):  # as the engine sets it
        yield


@pytest.mark.usefixtures("_kept")
def test_gradients_are_those_of_a_whole_backward() -> None:
    layers, x_TD, dy_TD = [weights(0), weights(3), weights(6)], draw(5, 6, seed=20), draw(5, 6, seed=21).detach()
    expected, layer = whole(mlp, layers, x_TD, dy_TD), halves.compiled(mlp)
    torch.testing.assert_close(whole(layer, layers, x_TD, dy_TD), expected)  # both halves at once

    rows = []
    for scale in (1.0, 2.0):  # two rows are under way
        y_TD, later = x_TD * scale, Later()
        for w in layers:
            y_TD = layer(w, y_TD)
        with later.half(first=True):
            (dx_TD,) = torch.autograd.grad(y_TD, x_TD, dy_TD, retain_graph=True)
        rows.append((y_TD, dx_TD, later))
    torch.testing.assert_close(rows[0][1], expected[0])
    for scale, (y_TD, _, later) in zip((1.0, 2.0), rows, strict=True):
        assert len(later.left) == len(layers)
        with later.half(first=False):
            found = torch.autograd.grad(y_TD, [t for w in layers for t in w.values()], dy_TD)
        assert not later.left
        torch.testing.assert_close(found, whole(mlp, layers, (x_TD.detach() * scale).requires_grad_(), dy_TD)[1:])
    assert Later.now is None


@pytest.mark.usefixtures("_kept")
def test_a_backward_that_is_one_operator_runs_once() -> None:
    def layer(w: Weights, x_TD: Tensor) -> Tensor:
        ids_TK, shares_TK = torch.tensor([[0, 2], [1, 2], [2, 0]]), torch.full((3, 2), 0.5)
        return experts(x_TD, ids_TK, shares_TK, w["up_EFD"], w["down_EDF"], activation="relu2")

    w, x_TD, dy_TD = {"up_EFD": draw(3, 8, 6, seed=1), "down_EDF": draw(3, 6, 8, seed=2)}, draw(3, 6, seed=3), draw(3, 6, seed=4).detach()
    expected = whole(layer, [w], x_TD, dy_TD)
    y_TD, later = halves.compiled(layer)(w, x_TD), Later()
    with later.half(first=True):
        first = torch.autograd.grad(y_TD, x_TD, dy_TD, retain_graph=True)
    with later.half(first=False):
        second = torch.autograd.grad(y_TD, list(w.values()), dy_TD)
    torch.testing.assert_close((*first, *second), expected)


def test_each_operator_is_in_one_half() -> None:
    graphs: dict[str, GraphModule] = {}
    parts: list[halves.Halves] = []

    def as_it_is(gm: GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm)

    def backward(gm: GraphModule, example_inputs: Any) -> Any:
        graphs["whole"] = gm
        found = halves.cut(gm, [True, True, True, False])
        assert found is not None
        parts.append(found)
        return make_boxed_func(gm)

    def flat(scale_D: Tensor, up_FD: Tensor, down_DF: Tensor, x_TD: Tensor) -> Tensor:
        return mlp({"scale_D": scale_D, "up_FD": up_FD, "down_DF": down_DF}, x_TD)

    w = weights(0)
    traced: Any = aot_function(flat, fw_compiler=as_it_is, bw_compiler=backward)
    traced(*w.values(), draw(5, 6, seed=9)).sum().backward()
    first, second = parts[0].first, parts[0].second
    every, one, two = ({node.name for node in graph.graph.nodes if node.op == "call_function"}
                       for graph in (graphs["whole"], first, second))
    assert one | two == every
    assert not one & two
    products = [Counter(node.target for node in graph.graph.nodes)[torch.ops.aten.mm.default] for graph in (first, second)]
    assert products == [2, 2]
    assert parts[0].first_gives == [3]
    assert parts[0].second_gives == [0, 1, 2]


def test_each_half_takes_what_it_needs_and_the_caller_keeps_nothing() -> None:
    def run(graph: GraphModule) -> halves.Run:
        return lambda arguments: graph(*arguments)

    found = halves.cut(torch.fx.symbolic_trace(lambda a, b, c: (a * c, b + c)), [False, True])
    assert found is not None
    assert (found.first_takes, found.second_takes) == ([0, 2], [1, 2])
    arguments = [torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0)]
    results, rest = halves.in_halves(found, run(found.first), run(found.second)).begin(arguments)
    assert arguments == []
    assert results == [10.0, None]
    assert rest() == [10.0, 8.0]


def test_a_backward_without_inputs_or_weights_to_learn_is_not_cut() -> None:
    graph = torch.fx.symbolic_trace(lambda a, b: (a @ b, None))
    assert halves.cut(graph, [True, False]) is None
    assert halves.cut(graph, [False, True]) is None


def test_a_function_that_fails_leaves_no_half_behind() -> None:
    with pytest.raises(ValueError, match="here"), Later().half(first=True):
        raise ValueError("here")
    assert Later.now is None
