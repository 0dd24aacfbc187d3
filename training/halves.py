"""Compiled layers whose backward runs in two halves: the gradients of inputs, and later, when nothing else is to do, those of weights.

The compiler's front end makes one graph of a layer's backward. What the gradients of the inputs are computed from becomes a graph of its
own, and the rest another one, which takes over what both need: no operator runs twice. Which half a call computes says the pipeline
(`Later`); without a word both, one after the other.
"""

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch._functorch.config
from torch.fx import Graph, GraphModule, Node

Run = Callable[[list[Any]], Sequence[Any]]  # takes what it frees
Compile = Callable[[GraphModule, Sequence[Any], Sequence[int]], Run]  # graph, inputs, numbers of the static ones


class Later:
    """What the compiled functions of one part of the model have left to compute of a row, in the order in which backward meets them."""

    now: ClassVar[tuple["Later", bool] | None] = None  # whose backward is under way, and whether it is the first half

    def __init__(self) -> None:
        self.left: deque[Callable[[], list[Any]]] = deque()

    @contextmanager
    def half(self, first: bool) -> Iterator[None]:
        """Compiled functions compute that half in a backward inside."""
        Later.now = self, first
        try:
            yield
        finally:
            Later.now = None


@dataclass
class Halves:
    """A graph of a backward, cut: `first` gives the gradients of inputs and what `second` takes over beside arguments of the whole."""

    first: GraphModule
    second: GraphModule
    first_takes: list[int]  # numbers of the whole graph's arguments
    second_takes: list[int]
    first_gives: list[int]  # numbers of the whole graph's results, before what is taken over
    second_gives: list[int]
    results: int


def cut(graph: GraphModule, later: Sequence[bool]) -> Halves | None:
    """A backward in two, the second with the results that are `later`; None where nothing or all would be left to it."""
    results = _results(graph)
    wanted = [r for r, late in zip(results, later, strict=True) if isinstance(r, Node) and not late]
    before = _ancestors(wanted)
    before |= {user for node in before for user in node.users if user.target is operator.getitem}  # all of what an operator returns
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    behind = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr") and node not in before]
    late = [r for r, is_late in zip(results, later, strict=True) if isinstance(r, Node) and is_late]
    if not wanted or not behind or any(node.is_impure() and not str(node.target).startswith("_c10d_functional") for node in behind):
        return None
    needed = {node for user in behind for node in user.all_input_nodes} | set(late)
    handed = [node for node in graph.graph.nodes if node in before and node in needed and node.op not in ("placeholder", "get_attr")]
    first_takes, second_takes = ([i for i, node in enumerate(arguments) if node in part] for part in (before, needed))
    first_gives, second_gives = ([i for i, r in enumerate(results) if isinstance(r, Node) and later[i] == half] for half in (False, True))
    first = _graph(graph, [arguments[i] for i in first_takes], before, [*wanted, *handed])
    second = _graph(graph, [*(arguments[i] for i in second_takes), *handed], set(behind), late)
    return Halves(first, second, first_takes, second_takes, first_gives, second_gives, len(results))


def _results(graph: GraphModule) -> list[Any]:
    return list(cast("Sequence[Any]", graph.graph.output_node().args[0]))


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _graph(whole: GraphModule, inputs: Sequence[Node], body: set[Node], results: Sequence[Node]) -> GraphModule:
    """A part of a graph with the same names."""
    made, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node not in copies and (node in body or node.op == "get_attr"):
            copies[node] = made.node_copy(node, copies.__getitem__)
    output = made.output(tuple(copies[r] for r in results))
    output.meta["user_visible_output_idxs"] = list(range(len(results)))  # the other half counts on their strides
    made.eliminate_dead_code(lambda node: node.op != "get_attr")
    return GraphModule(whole, made)


class Backward:
    """A compiled backward, called as the front end calls one.

    :param begin: arguments -> the results that the first half gives, None for the others, and what computes all of them
    """

    def __init__(self, begin: Callable[[list[Any]], tuple[list[Any], Callable[[], list[Any]]]]):
        self.begin, self._boxed_call = begin, True  # the front end looks for the latter in the object

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """The results of the half at hand; the second needs no argument and gives all."""
        if Later.now is None:
            return self.begin(arguments)[1]()
        later, first = Later.now
        if not first:
            arguments.clear()
            return later.left.popleft()()
        results, rest = self.begin(arguments)
        later.left.append(rest)
        return results


def whole(run: Run) -> Backward:
    """One that has no halves: the first computes all, the second hands it out."""
    def begin(arguments: list[Any]) -> tuple[list[Any], Callable[[], list[Any]]]:
        found = list(run(arguments))
        return found, lambda: found

    return Backward(begin)


def in_halves(halves: Halves, first: Run, second: Run) -> Backward:
    """One whose halves are compiled."""
    def begin(arguments: list[Any]) -> tuple[list[Any], Callable[[], list[Any]]]:
        kept, own = [arguments[i] for i in halves.second_takes], [arguments[i] for i in halves.first_takes]
        arguments.clear()
        given = list(first(own))
        results: list[Any] = [None] * halves.results
        for i, result in zip(halves.first_gives, given, strict=False):
            results[i] = result
        handed = given[len(halves.first_gives) :]

        def rest() -> list[Any]:
            every = list(results)
            for i, result in zip(halves.second_gives, second([*kept, *handed]), strict=True):
                every[i] = result
            return every

        return results, rest

    return Backward(begin)


def halved(graph: GraphModule, inputs: Sequence[Any], later: Sequence[bool], static: Sequence[int], compile: Compile) -> Backward:
    """The graph of a backward, compiled.

    :param later: which of its results are wanted in the second half
    :param static: numbers of the inputs that are where they were in the call before
    """
    halves = cut(graph, later) if len(later) == len(_results(graph)) else None
    if halves is None:
        return whole(compile(graph, inputs, static))
    first = compile(halves.first, [inputs[i] for i in halves.first_takes], [at for at, i in enumerate(halves.first_takes) if i in static])
    handed = [node.meta["val"] for node in _results(halves.first)[len(halves.first_gives) :]]
    return in_halves(halves, first, compile(halves.second, [*(inputs[i] for i in halves.second_takes), *handed], []))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(weights, ...)`, compiled."""
    weights = fn.__code__.co_varnames[0]
    return torch.compile(fn, fullgraph=True, dynamic=False, backend=functools.partial(_inductor, weights=weights))


def _inductor(graph: GraphModule, inputs: Sequence[Any], *, weights: str) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    later = [_argument(node) == weights for node in graph.graph.nodes if node.op == "placeholder"]

    def compile(part: GraphModule, inputs: Sequence[Any], is_backward: bool = False, static_input_idxs: Sequence[int] = (),
                **options: Any) -> Any:
        def inner(part: GraphModule, inputs: Sequence[Any], static: Sequence[int]) -> Any:
            return compile_fx_inner(part, inputs, is_backward=is_backward, static_input_idxs=static, **options)

        return halved(part, inputs, later, static_input_idxs, inner) if is_backward else inner(part, inputs, static_input_idxs)

    with torch._functorch.config.patch(enable_autograd_cache=False):  # it knows no backward that is two graphs
        return compile_fx(graph, inputs, inner_compile=compile)


def _argument(node: Node) -> str | None:
    """The name of the function's argument that an input of its graph comes from."""
    source = node.meta["grapharg"].source
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", None)
