"""How long a step takes on a machine that does nothing but products, passes over memory and collectives, each at its rate.

A collective that the trainer begins between graphs runs beside the products until its result is waited for, one after another in its group;
one inside a layer's graph is waited for at once. Launches cost nothing: this is a floor.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from perf.cases import Work
from perf.planning.graphs import Send
from perf.planning.machines import COPIES, LATENCY_SEC, LINKS, PRODUCTS, Machine
from perf.planning.trace import Begin, Trace, Wait


@dataclass
class Times:
    """Seconds of a step."""

    compute: float = 0.0
    exposed: float = 0.0  # communication that products wait for
    hidden: float = 0.0  # communication beside products
    by_axis: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # communication, hidden or not
    by_graph: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # compute

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def step_times(trace: Trace, machine: Machine) -> Times:
    """The events of a step one after the other."""
    times, now = Times(), 0.0
    free: dict[str, float] = {}  # when a group has sent what it was given
    ends: dict[int, float] = {}
    for event in trace.events:
        if isinstance(event, Wait):
            late = max(0.0, ends.pop(event.storage, now) - now)
            times.exposed += late
            now += late
        elif isinstance(event, Begin):
            taken = send_seconds(event.send, trace, machine)
            free[event.send.group] = ends[event.storage] = max(now, free.get(event.send.group, 0.0)) + taken
            times.by_axis[label(event.send, trace, "")] += taken
        else:
            for part in (event,) if isinstance(event, Work) else event.steps:
                if isinstance(part, Send):
                    taken = send_seconds(part, trace, machine)
                    times.by_axis[label(part, trace, " in layers")] += taken
                    times.exposed += taken
                else:
                    taken = part.seconds(PRODUCTS * machine.flops, COPIES * machine.bandwidth)
                    times.compute += taken
                    times.by_graph["between the layers" if isinstance(event, Work) else event.name] += taken
                now += taken
    if ends:
        raise AssertionError(f"{len(ends)} collectives that nobody waits for")
    times.hidden = max(0.0, sum(times.by_axis.values()) - times.exposed)
    return times


def label(sent: Send, trace: Trace, where: str) -> str:
    """Over which axes a collective goes, and its kind."""
    return f"{trace.groups[sent.group][0]}: {sent.kind}{where}"


def received_bytes(sent: Send, ranks: int) -> float:
    """What a rank gets from the others."""
    return sent.bytes * (ranks - 1) / ranks * (2 if sent.kind == "all_reduce" else 1)


def send_seconds(sent: Send, trace: Trace, machine: Machine) -> float:
    """By the slower of the links within a node and the network; a node's ranks share the latter's work."""
    ranks = trace.groups[sent.group][1]
    if len(ranks) == 1:
        return 0.0
    nodes = {rank // machine.node for rank in ranks}
    here = len(ranks) / len(nodes)
    passes = sent.bytes * (2 if sent.kind == "all_reduce" else 1)
    inside = passes * (1 - 1 / len(ranks)) / (LINKS * machine.link) if here > 1 else 0.0
    share = 1.0 if sent.kind == "all_to_all" else 1 / here  # an all-to-all's parts all differ
    outside = passes * (1 - here / len(ranks)) * share / (LINKS * machine.network)
    return max(inside, outside) + LATENCY_SEC


def bytes_by_axis(trace: Trace) -> Counter[str]:
    """What a rank receives in a step."""
    counts: Counter[str] = Counter()
    for event in trace.events:
        outside = isinstance(event, Begin)
        for part in (event.send,) if isinstance(event, Begin) else getattr(event, "steps", ()):
            if isinstance(part, Send):
                ranks = len(trace.groups[part.group][1])
                counts[label(part, trace, "" if outside else " in layers")] += round(received_bytes(part, ranks))
    return counts
