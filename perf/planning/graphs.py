"""What a compiled layer does, read off its graph: products and passes over memory, collectives, the most memory between its ends."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx import GraphModule, Node

from perf.cases import Work
from perf.planning import costs
from perf.planning.costs import Load, tensor_bytes
from perf.planning.repeats import UNNAMED

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "hand_on")


@dataclass(frozen=True)
class Send:
    """A collective: the larger of what goes in and what comes out, and the name of its group."""

    kind: str
    bytes: int
    group: str


@dataclass(frozen=True)
class Begin:
    """A collective whose result will lie in this storage."""

    send: Send
    storage: int


@dataclass(frozen=True)
class Wait:
    """For the collective whose result lies in this storage."""

    storage: int


@dataclass(frozen=True)
class Graph:
    """One direction of one layer."""

    name: str
    steps: tuple[Work | Begin | Wait, ...]
    transient_bytes: int  # most that its own tensors take at a time, results included


def collective(target: Any) -> str | None:
    """The kind of collective that an operator begins."""
    name = str(target)
    if ("c10d" not in name and "hand_on" not in name) or "wait" in name or "::" in name:
        return None
    return next((kind for kind in COLLECTIVES if kind.replace("_", "") in name.replace("_", "")), None)


def send(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, kind: str) -> Send:
    """The collective that this call begins."""
    values = costs.arguments(target, args, kwargs)
    group = values.get("group_name") or values["process_group"]
    largest = max(sum(map(tensor_bytes, values.values())), tensor_bytes(output))
    return Send(kind, largest, group if isinstance(group, str) else ProcessGroup.unbox(group).group_name)


def analyse(name: str, graph: GraphModule, load: Load) -> Graph:
    """Operations that a compiler fuses count once for what they read and write together, at the place of the last of them; views cost
    nothing. Collectives begin and are waited for at their places."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    owners = {n: _owner(n) for n in graph.graph.nodes}
    users = _users(graph, owners)
    stored = {n for n in nodes if owners[n] is n and (not _fused(n) or any(u.op == "output" or not _fused(u) for u in users[n]))}
    clusters = {cluster[-1]: cluster for cluster in _clusters(nodes, owners)}
    steps: list[Work | Begin | Wait] = []
    begun: dict[Node, int] = {}
    for n in nodes:
        if _waits(n):
            steps.append(Wait(begun[_collective_of(n)]))
        elif n in clusters:
            steps.append(_pass(clusters[n], owners, stored))
        elif owners[n] is n and not _fused(n) and n.target is not operator.getitem:
            call, kind = (n.target, _meta(n.args), _meta(n.kwargs), n.meta["val"]), collective(n.target)
            if kind is None:
                steps.append(costs.work(*call, load))
            else:
                begun[n] = next(UNNAMED)
                steps.append(Begin(send(*call, kind), begun[n]))
    return Graph(name, tuple(steps), _transient(nodes, owners, users, stored))


def _waits(n: Node) -> bool:
    return getattr(n.target, "__name__", "").startswith("wait_tensor")


def _collective_of(n: Node) -> Node:
    """The one that a wait is for."""
    while n.op == "call_function" and (_waits(n) or collective(n.target) is None):
        n = n.all_input_nodes[0]
    return n


def _pass(cluster: list[Node], owners: dict[Node, Node], stored: set[Node]) -> Work:
    """Over memory, by what is fused."""
    read = {i for n in cluster for i in n.all_input_nodes if owners[i] not in cluster}
    written = sum(tensor_bytes(n.meta.get("val")) for n in cluster if n in stored)
    return Work(0.0, float(_read_bytes(read, owners) + written))


def outcome(graph: GraphModule) -> Callable[[Sequence[Any]], list[Any]]:
    """What the graph returns for inputs of the shapes that it was made with, on fake tensors: new memory, or views where it has views.

    Its operators do not run, which for a layer would take longer than all else in a plan.
    """
    inputs = {n: i for i, n in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    returned = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    shown = {n: _owner(n) for n in returned if isinstance(n, Node)}
    if any(n.meta["val"].dtype != owner.meta["val"].dtype for n, owner in shown.items()):
        return lambda given: list(graph(*given))  # a view as another type is not a matter of strides

    def made(given: Sequence[Any]) -> list[Any]:
        whole = {owner: given[inputs[owner]] if owner in inputs else _like(owner.meta["val"]) for owner in set(shown.values())}
        return [_view(whole[shown[n]], n, shown[n]) if isinstance(n, Node) else n for n in returned]

    return made


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def _view(whole: Tensor, n: Node, owner: Node) -> Tensor:
    if n is owner:
        return whole
    shape, base = n.meta["val"], owner.meta["val"]
    return whole.as_strided(shape.size(), shape.stride(), whole.storage_offset() + shape.storage_offset() - base.storage_offset())


def _is_view(n: Node) -> bool:
    if n.target is operator.getitem:  # one of the parts of a split
        return _is_view(n.all_input_nodes[0])
    name = getattr(n.target, "__name__", "")
    return bool(getattr(n.target, "is_view", False)) or name.startswith(("wait_tensor", "_unsafe_view", "detach", "alias"))


def _owner(n: Node) -> Node:
    """The node whose memory a node shows."""
    while n.op == "call_function" and n.all_input_nodes and _is_view(n):
        n = n.all_input_nodes[0]
    return n


def _fused(n: Node) -> bool:
    return n.op == "call_function" and costs.is_pointwise(n.target)


def _users(graph: GraphModule, owners: dict[Node, Node]) -> dict[Node, list[Node]]:
    """Who reads a node's memory, through views too."""
    users: dict[Node, list[Node]] = {n: [] for n in graph.graph.nodes}
    for n in graph.graph.nodes:
        if n.op == "output" or owners[n] is n:
            for read in n.all_input_nodes:
                users[owners[read]].append(n)
    return users


def _clusters(nodes: list[Node], owners: dict[Node, Node]) -> list[list[Node]]:
    """Fused nodes that are connected."""
    parent: dict[Node, Node] = {n: n for n in nodes if owners[n] is n and _fused(n)}

    def top(n: Node) -> Node:
        while parent[n] is not n:
            n = parent[n]
        return n

    for n in parent:
        for read in n.all_input_nodes:
            if owners[read] in parent:
                parent[top(owners[read])] = top(n)
    found: dict[Node, list[Node]] = {}
    for n in parent:
        found.setdefault(top(n), []).append(n)
    return list(found.values())


def _read_bytes(read: set[Node], owners: dict[Node, Node]) -> int:
    """Of views of the same memory together no more than there is."""
    seen: dict[Node, int] = {}
    for n in read:
        seen[owners[n]] = seen.get(owners[n], 0) + tensor_bytes(n.meta.get("val"))
    return sum(min(size, tensor_bytes(owner.meta.get("val"))) for owner, size in seen.items())


def _transient(nodes: list[Node], owners: dict[Node, Node], users: dict[Node, list[Node]], stored: set[Node]) -> int:
    place = {n: i for i, n in enumerate(nodes)}
    ends: dict[int, list[Node]] = {}
    for n in stored:
        last = max((len(nodes) if u.op == "output" else place[u] for u in users[n]), default=place[n])
        ends.setdefault(last, []).append(n)
    live = most = 0
    for i, n in enumerate(nodes):
        if n in stored:
            live += _own_bytes(n)
        room = costs.workspace(n.target, _values(n)) if hasattr(n.target, "_schema") else 0
        most = max(most, live + room)
        live -= sum(map(_own_bytes, ends.get(i, ())))
    return most


def _own_bytes(n: Node) -> int:
    """Several results are counted where they are taken apart."""
    value = n.meta.get("val")
    return tensor_bytes(value) if isinstance(value, Tensor) else 0


def _meta(value: Any) -> Any:
    """Arguments with the tensors that nodes stand for."""
    if isinstance(value, Node):
        return value.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(map(_meta, value))
    return {k: _meta(v) for k, v in value.items()} if isinstance(value, dict) else value


def _values(n: Node) -> dict[str, Any]:
    return costs.arguments(n.target, _meta(n.args), _meta(n.kwargs))
