"""What a configuration needs and takes on so many GPUs, and which layouts suit it."""

import copy
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from configs.schema import Config, RowSize
from model.stages import own_stages, schedule_of
from parallel.mesh import sizes
from parallel.pipeline import most_live
from parallel.schedules import orders
from parallel.validate import Environment, validate
from perf.planning.costs import Load, Ring
from perf.planning.machines import GIB, RESERVED_BYTES, Machine
from perf.planning.meter import Trace
from perf.planning.timeline import Times, bytes_by_axis, step_times
from perf.planning.trace import meeting, trace_step
from training.step import DTYPES, keeps_hidden

SAMPLED_TOKENS = 1 << 16  # for the spread of random choices over the ranks of an expert group


@dataclass(frozen=True)
class Plan:
    """One configuration on so many GPUs of one kind."""

    cfg: Config
    world: int
    machine: Machine
    traces: list[Trace]  # of one rank, or of one of each place in the pipeline
    all_times: list[Times]  # of the same
    load: Load

    @property
    def trace(self) -> Trace:
        """Of the rank whose memory is fullest."""
        return max(self.traces, key=lambda trace: trace.peak_bytes)

    @property
    def busiest(self) -> int:
        """The place in the pipeline that computes longest."""
        return max(range(len(self.traces)), key=lambda place: self.all_times[place].compute)

    @property
    def times(self) -> Times:
        """Of that one."""
        return self.all_times[self.busiest]

    @property
    def peak_bytes(self) -> float:
        return self.trace.peak_bytes + RESERVED_BYTES

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU, without padding."""
        n = sizes(self.cfg.parallel, self.world)
        return self.load.fill * self.cfg.data.rows[-1].tokens * self.cfg.train.accumulate * n.dp / self.world / self.times.total


def plan(cfg: Config, world: int, machine: Machine, imbalance: float | None = None, fill: float = 1.0, to_the_end: bool = True) -> Plan:
    """Simulates a step; routing is random unless the fullest rank's share is given.

    :param to_the_end: False: raises TooMuch as soon as it does not fit
    """
    held = load(cfg, random_imbalance(cfg) if imbalance is None else min(imbalance, cfg.parallel.ep), fill)
    pp, limit = cfg.parallel.pp, math.inf if to_the_end else machine.memory_bytes - RESERVED_BYTES
    traces = [trace_step(cfg, world, True, machine.memory_bytes, held, place * (world // pp), limit) for place in range(pp)]
    return Plan(cfg, world, machine, traces, step_times(traces, machine), held)


def load(cfg: Config, imbalance: float = 1.0, fill: float = 1.0) -> Load:
    """Rows of equally long utterances, as many as the row takes, which fill this share of its slots."""
    row, p = cfg.data.rows[-1], cfg.parallel
    tokens = row.tokens * fill
    rows = tokens / (p.cp * p.tp) * cfg.model.decoder.top_k * imbalance
    return Load(rows, tokens / row.utterances, row.audio_frames / row.utterances, fill, imbalance, ring(cfg, tokens / row.utterances))


def ring(cfg: Config, document: float) -> Ring | None:
    """A token sees half of its document on average: how much of that lies on the same rank, in a row of documents of this length."""
    cp, tokens = cfg.parallel.cp, cfg.data.rows[-1].tokens
    if cp == 1:
        return None
    slots = np.arange(tokens)
    starts, chunk = slots // document * document, tokens // (2 * cp)
    mirrored = (2 * cp - 1 - slots // chunk) * chunk  # where the rank's other chunk begins
    own = 1 + slots - np.maximum(starts, slots // chunk * chunk)
    own = own + np.where(mirrored < slots, (mirrored + chunk - np.maximum(starts, mirrored)).clip(0), 0)
    share = 1 / cp if cfg.parallel.cp_split == "document" else float(own.sum() / (1 + slots - starts).sum())
    return Ring(tokens // cp, share * document / 2, (1 - share) * document / 2 / (cp - 1))


def random_imbalance(cfg: Config) -> float:
    """Most over mean of the tokens of the ranks of an expert group when every token chooses its experts at random, or must not."""
    d, p = cfg.model.decoder, cfg.parallel
    if p.ep == 1 or "E" not in d.pattern or d.force_balance:
        return 1.0
    tokens = min(SAMPLED_TOKENS, cfg.data.rows[-1].tokens * p.ep // (p.cp * p.tp))
    chosen = np.random.default_rng(0).random((tokens, d.n_experts)).argpartition(d.top_k, 1)[:, : d.top_k]
    counts = np.bincount(chosen.ravel() // (d.n_experts // p.ep), minlength=p.ep)
    return float(counts.max() / counts.mean())


def expert_buffers(plan: Plan) -> dict[str, float]:
    """Bytes of a rank's expert layers' pre-activations: kept for backward, of the static buffers, and of rows that routing fills."""
    d, width = plan.cfg.model.decoder, DTYPES[plan.cfg.precision].itemsize
    layers, p = expert_layers(plan.cfg), plan.cfg.parallel
    tokens = plan.cfg.data.rows[-1].tokens / (p.cp * p.tp)
    inner = d.moe_ffn * (2 if d.activation == "swiglu" else 1)
    filled = tokens * plan.load.fill
    seen = p.ep * (filled * meeting(d.n_experts, d.top_k, p.ep) if p.ep_dispatch == "alltoall" else tokens)
    bound = layers * seen * d.top_k * inner * width
    return {"kept": bound if keeps_hidden(plan.cfg) else 0.0, "bound": bound, "expected": layers * filled * d.top_k * inner * width}


def expert_layers(cfg: Config) -> float:
    """How many hold what they computed of a row, on the rank of the pipeline with most, in the middle of a step."""
    found = []
    for place, order in enumerate(orders(schedule_of(cfg), cfg.parallel.pp, cfg.parallel.pp_chunks, cfg.train.accumulate)):
        own = own_stages(cfg, place)
        found.append(most_live(order) * sum(cfg.model.decoder.pattern[i] == "E" for stage in own for i in stage.layers) / len(own))
    return max(found)


def with_row(cfg: Config, tokens: int) -> Config:
    """The largest row made this long, with as many more utterances."""
    changed, last = copy.deepcopy(cfg), cfg.data.rows[-1]
    share = tokens / last.tokens
    frames, utterances = int(last.audio_frames * share), max(1, round(last.utterances * share))
    changed.data.rows = [RowSize(tokens, frames, utterances, min(last.utterance_frames, max(0, frames - 1), tokens - 1), last.label_tokens)]
    return changed


def layouts(cfg: Config, world: int) -> Iterator[Config]:
    """Every layout that the rules allow on so many ranks; with a pipeline, its ranks share the rows that each had without."""
    powers = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= world]
    experts = powers if "E" in cfg.model.decoder.pattern else [1]
    choices = (powers[:3], powers[:4], powers[:4], experts, {1, max(1, world // 8)}, (1, 2, 3), ("allgather", "alltoall"))
    for pp, tp, cp, ep, copies, stage, dispatch in product(*choices):
        if (dispatch == "alltoall" and ep == 1) or world % math.lcm(pp * tp * cp * copies, pp * ep):
            continue
        if stage == 1 and cfg.train.accumulate * pp == 1:
            continue  # the same as 2
        changed = copy.deepcopy(cfg)
        changed.parallel = replace(cfg.parallel, pp=pp, tp=tp, cp=cp, ep=ep, dp_replicate=copies, zero_stage=stage, ep_dispatch=dispatch)
        changed.train.accumulate *= pp
        if not validate(changed, Environment(world, command="")):
            yield changed


def seconds_and_memory(started: float) -> dict[str, float]:
    """What planning itself took."""
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": round(time.perf_counter() - started, 1),
            "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB, 2)}


def figures(plan: Plan) -> dict[str, object]:
    """The keys of the JSON object."""
    return {"ranks": plan.world, "fits": plan.fits, "peak_gib": round(plan.peak_bytes / GIB, 1), "step_seconds": round(plan.times.total, 4),
            "tokens_per_second_per_gpu": round(plan.tokens_per_second), "exposed_communication": round(plan.times.exposed, 4),
            "host_gib": round(plan.trace.host_peak_bytes / GIB, 1)}


def communication(plan: Plan) -> list[dict[str, object]]:
    """One row for each kind of collective over each group."""
    received: Counter[str] = bytes_by_axis(plan.traces[plan.busiest])
    return [{"over, what": name, "GB received a step": received[name] / 1e9, "ms": 1e3 * plan.times.by_axis[name]} for name in received]
