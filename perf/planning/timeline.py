"""How long a step takes on a machine that does nothing but products, passes over memory and messages, each at its rate.

A collective runs beside the products from where it begins, between graphs or in one, until its result is waited for, one after another in
its group; what a rank of a pipeline sends leaves as soon as it is there. Products wait for copies to and from the host, which are in their
stream, and for what the host computes. Launches cost nothing: this is a floor.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from perf.cases import Work
from perf.planning.graphs import Begin, Graph, Send, Wait
from perf.planning.machines import COPIES, LATENCY_SEC, LINKS, PRODUCTS, Machine
from perf.planning.meter import Copied, Event, HostWork, Sent, Taken, Trace

MESSAGES = "pp: receive"


@dataclass
class Times:
    """Seconds of a step."""

    compute: float = 0.0  # of the device and, while it waits, of the host
    exposed: float = 0.0  # communication that products wait for
    bubble: float = 0.0  # in which other ranks of the pipeline compute
    hidden: float = 0.0  # communication beside products
    by_axis: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # communication, hidden or not
    by_graph: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # compute

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.bubble


def step_times(traces: Sequence[Trace], machine: Machine) -> list[Times]:
    """Of each rank of a pipeline, or of the one that stands for all; all end when the last does."""
    sent: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    ranks = [Rank(place, trace, machine, sent) for place, trace in enumerate(traces)]
    while any(rank.go_on() for rank in ranks):
        pass
    if waiting := [rank.place for rank in ranks if rank.events]:
        raise AssertionError(f"ranks {waiting} of the pipeline wait for ever")
    end = max(rank.now for rank in ranks)
    for rank in ranks:
        if rank.ends:
            raise AssertionError(f"{len(rank.ends)} collectives that nobody waits for")
        rank.times.bubble += end - rank.now
        rank.times.hidden = max(0.0, sum(rank.times.by_axis.values()) - rank.times.exposed)
    return [rank.times for rank in ranks]


class Rank:
    """One rank of a pipeline on its way through its step.

    :param sent: of each pair of ranks, when its messages arrive and how long they travel
    """

    def __init__(self, place: int, trace: Trace, machine: Machine, sent: dict[tuple[int, int], list[tuple[float, float]]]):
        self.place, self.trace, self.machine, self.sent = place, trace, machine, sent
        self.events = list(reversed(trace.events))  # to come
        self.times, self.now = Times(), 0.0
        self.free: dict[str | int, float] = {}  # when a group, or the way to a rank, has sent what it was given
        self.ends: dict[int, float] = {}

    def go_on(self) -> bool:
        """Up to a message that is not sent yet; whether there was anything to do."""
        before = len(self.events)
        while self.events and not self._must_wait(self.events[-1]):
            self._pass(self.events.pop())
        return len(self.events) < before

    def _must_wait(self, event: Event) -> bool:
        return isinstance(event, Taken) and event.number >= len(self.sent[event.source, self.place])

    def _pass(self, event: Event, layer: str = "") -> None:
        """:param layer: whose graph it belongs to"""
        times, trace, machine = self.times, self.trace, self.machine
        if isinstance(event, Work):
            self._compute(event.seconds(PRODUCTS * machine.flops, COPIES * machine.bandwidth), layer or "between the layers")
        elif isinstance(event, HostWork):
            self._compute(event.bytes / (COPIES * machine.host_bandwidth), "the host")
        elif isinstance(event, Wait):
            times.exposed += self._until(self.ends.pop(event.storage, self.now))
        elif isinstance(event, Begin):
            taken = send_seconds(event.send, trace, machine)
            self.ends[event.storage] = self._sent_by(event.send.group, taken)
            times.by_axis[label(event.send, trace, layer)] += taken
        elif isinstance(event, Copied):
            taken = event.bytes / (LINKS * machine.host_link)
            times.by_axis[event.label] += taken
            times.exposed += self._until(self.now + taken)
        elif isinstance(event, Sent):
            taken = message_seconds(event, self.place, trace, machine)
            self.sent[self.place, event.to].append((self._sent_by(event.to, taken), taken))
        elif isinstance(event, Taken):
            arrival, taken = self.sent[event.source, self.place][event.number]
            late = self._until(arrival)
            times.by_axis[MESSAGES] += taken
            times.exposed += min(late, taken)
            times.bubble += max(0.0, late - taken)
        else:
            for part in event.steps:
                self._pass(part, event.name)

    def _compute(self, taken: float, name: str) -> None:
        self.times.compute += taken
        self.times.by_graph[name] += taken
        self.now += taken

    def _until(self, moment: float) -> float:
        late = max(0.0, moment - self.now)
        self.now += late
        return late

    def _sent_by(self, way: str | int, seconds: float) -> float:
        self.free[way] = max(self.now, self.free.get(way, 0.0)) + seconds
        return self.free[way]


def label(sent: Send, trace: Trace, layer: str) -> str:
    """Over which axes a collective goes, its kind, and whether a layer's graph has it."""
    return f"{trace.groups[sent.group][0]}: {sent.kind}{' in layers' if layer else ''}"


def received_bytes(sent: Send, ranks: int) -> float:
    """What a rank gets from the others."""
    if sent.kind == "hand_on":
        return sent.bytes
    return sent.bytes * (ranks - 1) / ranks * (2 if sent.kind == "all_reduce" else 1)


def send_seconds(sent: Send, trace: Trace, machine: Machine) -> float:
    """By the slower of the links within a node and the network; a node's ranks share the latter's work."""
    ranks = trace.groups[sent.group][1]
    if len(ranks) == 1:
        return 0.0
    nodes = {rank // machine.node for rank in ranks}
    if sent.kind == "hand_on":  # all wait for the slowest pair
        return sent.bytes / (LINKS * (machine.link if len(nodes) == 1 else machine.network)) + LATENCY_SEC
    here = len(ranks) / len(nodes)
    passes = sent.bytes * (2 if sent.kind == "all_reduce" else 1)
    inside = passes * (1 - 1 / len(ranks)) / (LINKS * machine.link) if here > 1 else 0.0
    share = 1.0 if sent.kind == "all_to_all" else 1 / here  # an all-to-all's parts all differ
    outside = passes * (1 - here / len(ranks)) * share / (LINKS * machine.network)
    return max(inside, outside) + LATENCY_SEC


def message_seconds(message: Sent, place: int, trace: Trace, machine: Machine) -> float:
    """From one rank of a pipeline to another."""
    ranks = next(ranks for axis, ranks in trace.groups.values() if "pp" in axis.split(", "))
    near = ranks[place] // machine.node == ranks[message.to] // machine.node
    return message.bytes / (LINKS * (machine.link if near else machine.network)) + LATENCY_SEC


def bytes_by_axis(trace: Trace) -> Counter[str]:
    """What a rank receives in a step, and what passes between it and its host."""
    counts: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Taken):
            counts[MESSAGES] += event.bytes
        if isinstance(event, Copied):
            counts[event.label] += event.bytes
        for part in event.steps if isinstance(event, Graph) else (event,):
            if isinstance(part, Begin):
                sent, layer = part.send, event.name if isinstance(event, Graph) else ""
                counts[label(sent, trace, layer)] += round(received_bytes(sent, len(trace.groups[sent.group][1])))
    return counts
