"""What a rank does in a step, written down while it happens: memory on the device and its host, and what runs between compiled graphs."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf.cases import Work
from perf.planning import costs
from perf.planning.costs import Load, tensor_bytes
from perf.planning.graphs import Begin, Graph, Wait, collective, send
from perf.planning.repeats import Recording, record, repeat, shapes_of

HOST = "host"  # the purpose of what is not on the device
TO_HOST, FROM_HOST = "host: sent there", "host: fetched"


@dataclass(frozen=True)
class Sent:
    """Hidden states, or their gradient, that leave for another rank of the pipeline."""

    to: int
    bytes: int


@dataclass(frozen=True)
class Taken:
    """The wait for what another rank of the pipeline sent: the message of this number from there."""

    source: int
    number: int
    bytes: int


@dataclass(frozen=True)
class Copied:
    """Between the device and its host, in the stream of what is computed."""

    label: str
    bytes: int


@dataclass(frozen=True)
class HostWork:
    """A pass of the host over its memory, for which the device waits."""

    bytes: int


Event = Work | Begin | Wait | Graph | Sent | Taken | Copied | HostWork


@dataclass
class Trace:
    """What one rank does in a step."""

    events: list[Event] = field(default_factory=list)
    state: Counter[str] = field(default_factory=Counter)  # bytes before the step, by purpose
    forward_bytes: int = 0  # most that the forward passes of rows have left at the end of one of them
    at_peak: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    host_state_bytes: int = 0  # on the host before the step, and the most of it
    host_peak_bytes: int = 0
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # name -> axis and ranks
    graphs: dict[str, Graph] = field(default_factory=dict)


class TooMuch(Exception):
    """More memory than there is."""


class Meter(TorchDispatchMode):
    """Writes down what is allocated on the device and what happens between graphs.

    :param limit_bytes: raises TooMuch beyond them
    """

    def __init__(self, trace: Trace, load: Load, block_bytes: int, limit_bytes: float = math.inf):
        super().__init__()
        self.trace, self.load, self.block_bytes, self.limit_bytes = trace, load, block_bytes, limit_bytes
        self.live: Counter[str] = Counter()
        self.held: dict[int, tuple[int, str]] = {}
        self.purpose, self.silent = "other", False
        self.most = 0  # bytes at a time since somebody set it
        self.recordings: dict[Hashable, Recording | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, AsyncCollectiveTensor) for t in types):
            return NotImplemented  # which asks again, unwrapped
        if "wait_tensor" in str(func) and not self.silent:
            self.trace.events.append(Wait(args[0].untyped_storage()._cdata))
            return args[0]  # as a real one does; a fake one returns new memory
        out = func(*args, **(kwargs or {}))
        if not self.silent:
            self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        kind = collective(func)
        if kind is not None:
            began = send(func, args, kwargs, out, kind)
            storage = next(t for t in tree_leaves((out, args)) if isinstance(t, Tensor)).untyped_storage()._cdata
            self.trace.events.append(Begin(began, storage))
            if func.namespace == "c10d":
                self.trace.events.append(Wait(storage))
        elif not func.is_view:
            values = costs.arguments(func, args, kwargs)
            read = [t for t in tree_leaves(list(values.values())) if isinstance(t, Tensor)]
            written = tensors or costs.changed(func, values)
            moved = tensor_bytes(read) + tensor_bytes(written)
            if written and any(map(self._on_host, read)):
                self._follow_host(func, values, moved, tensors)
            elif written:
                self.trace.events.append(Work(0.0, float(moved)) if costs.is_pointwise(func) or func.namespace == "aten"
                                         else costs.work(func, args, kwargs, out, self.load))
        self.hold(tensors)

    def _follow_host(self, func: Any, values: dict[str, Any], moved: int, out: list[Tensor]) -> None:
        """What reads memory of the host runs there, but for copies into a tensor of the device and those that need not be waited for."""
        fetched = (func is torch.ops.aten._to_copy.default and values["non_blocking"]) or (
            func is torch.ops.aten.copy_.default and not self._on_host(values["self"]))
        if fetched:
            self.trace.events.append(Copied(FROM_HOST, tensor_bytes(out)))
        else:
            self.trace.events.append(HostWork(moved))
            with self.within(HOST):
                self.hold(out)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Stands for parallel.offload.to_host: what is not there is copied."""
        moved = []
        for t in tensors:
            if not self._on_host(t):
                self.trace.events.append(Copied(TO_HOST, tensor_bytes(t)))
                with self.unobserved():
                    t = torch.empty_like(t, memory_format=torch.contiguous_format)
                with self.within(HOST):
                    self.hold([t])
            moved.append(t)
        return moved

    def _on_host(self, t: Tensor) -> bool:
        return self.held.get(t.untyped_storage()._cdata, (0, ""))[1] == HOST

    def hold(self, tensors: list[Tensor]) -> None:
        """New memory is counted until nothing shows it any more."""
        for t in tensors:
            storage = t.untyped_storage()
            key = storage._cdata
            if key in self.held or not storage.nbytes():
                continue
            size = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
            self.held[key] = size, self.purpose
            self.live[self.purpose] += size
            weakref.finalize(storage, self._release, key)
        self.trace.host_peak_bytes = max(self.trace.host_peak_bytes, self.live[HOST])
        self.note(0)

    def _release(self, key: int) -> None:
        size, purpose = self.held.pop(key)
        self.live[purpose] -= size

    @property
    def device(self) -> Counter[str]:
        """Bytes on the device by purpose."""
        return Counter({purpose: size for purpose, size in self.live.items() if purpose != HOST})

    @property
    def device_bytes(self) -> int:
        return self.live.total() - self.live[HOST]

    def note(self, more: int) -> None:
        """Whether this is the most memory so far, with `more` that is given back at once."""
        total = self.device_bytes + more
        self.most = max(self.most, total)
        if total > self.trace.peak_bytes:
            self.trace.peak_bytes = total
            self.trace.at_peak = self.device + Counter({"workspace of a layer": more})
        if total > self.limit_bytes:
            raise TooMuch

    @contextmanager
    def within(self, purpose: str) -> Iterator[None]:
        """What is allocated here is for this."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def repeated(self, key: Hashable, function: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        """What the function returns, which runs for the first inputs of these shapes alone."""
        key, before = (key, shapes_of(inputs)), self.device_bytes
        recording = self.recordings.get(key)
        if recording is None:
            self.most = before
            out, recording = record(function, inputs, self.trace.events, lambda: self.most - before)
            self.recordings.setdefault(key, recording)
            return out
        with self.unobserved():
            out, events = repeat(recording, inputs)
        self.trace.events += events
        self.note(recording.transient_bytes)
        self.hold([t for t in tree_leaves(out) if isinstance(t, Tensor)])
        return out

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """While a graph is made or run, which is written down as a whole."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before
