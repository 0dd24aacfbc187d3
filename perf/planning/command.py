"""plan.py: reads its arguments, plans, and shows tables and a picture."""

import functools
import math
import multiprocessing
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.schema import Config
from model import params, speech_lm
from parallel.names import kept_share
from parallel.validate import Environment, validate
from perf.planning import planner
from perf.planning.machines import GIB, LINKS, MACHINES, PRODUCTS, RESERVED_BYTES, Machine
from perf.planning.meter import TooMuch
from perf.planning.planner import Plan
from perf.planning.timeline import Times
from perf.report import show
from training import config
from training.step import offload_of

NEEDED_BY_RUNS_ALONE = ("data.manifest", "data.tokenizer", "run_dir")
TRIED = 8  # layouts that a search simulates
PICTURES = (".png", ".pdf", ".svg")
PROCESSES = 8  # at most, of a search
POLICIES = ("none", "selective", "full")  # of activation checkpointing, the fastest first
CHOSEN = (*(f"parallel.{key}" for key in ("zero_stage", "dp_replicate", "pp", "cp", "tp", "ep", "ep_dispatch")), "train.accumulate",
          "train.activation_checkpointing", "train.activation_checkpointing_encoder")  # what a search varies
STATE_BYTES = {"none": 16.0, "optimizer": 6.0, "parameters": 0.0}  # of a parameter on the device, gradients included, by offload


class Refused(ValueError):
    """Sentences that say what cannot be planned."""


def show_plan(own: Mapping[str, str], overrides: Sequence[str], started: float) -> dict[str, Any]:
    """Plans one configuration and shows it."""
    cfg, world, machine = read(own, overrides)
    path = picture_path(own)
    refuse(validate(cfg, Environment(world, command="")))
    plan = planner.plan(cfg, world, machine, *routing(own, cfg))
    show("memory of a rank (GiB)" if cfg.parallel.pp == 1 else "memory of the fullest rank (GiB)", memory(plan))
    show("communication", planner.communication(plan))
    show("step", times(plan))
    if len(plan.traces) > 1:
        show("pipeline", places(plan))
    if plan.load.imbalance != 1.0 or cfg.parallel.ep > 1:
        buffers = {name: size / GIB for name, size in planner.expert_buffers(plan).items()}
        show("experts", [{"fullest rank over the mean": plan.load.imbalance, "kept pre-activations GiB": buffers["kept"],
                          "static bound GiB": buffers["bound"], "expected GiB": buffers["expected"]}])
    picture(plan, path)
    print(f"wrote {path}")
    return planner.figures(plan) | planner.seconds_and_memory(started)


def search(own: Mapping[str, str], overrides: Sequence[str], started: float) -> dict[str, Any]:
    """Simulates the layouts that promise most, and shows them, those that fit first."""
    cfg, world, machine = read(own, overrides)
    path = picture_path(own)
    imbalance, fill = routing(own, cfg)
    candidates = most_promising(cfg, world, machine)[:TRIED]
    if not candidates:
        raise Refused(f"no layout of {world} ranks satisfies the rules; try another world or row")
    try_one = functools.partial(attempt, given=cfg, world=world, machine=machine, imbalance=imbalance, fill=fill)
    found = each(try_one, candidates)
    found.sort(key=lambda f: (not f["fits"], -f["tokens_per_second_per_gpu"] if f["fits"] else f["peak_gib"]))
    show(f"layouts of {world} ranks", [
        {"layout": f["layout"], "recomputed": f["recomputed"], "fits": f["fits"], "peak GiB": f["peak_gib"],
         "step ms": 1e3 * f["step_seconds"], "tokens/s/GPU": f["tokens_per_second_per_gpu"], "exposed ms": 1e3 * f["exposed_communication"]}
        for f in found])
    picture_of_layouts(found, machine, path)
    given = (f"{key}={value}" for key, value in own.items() if key != "picture")
    print(f"wrote {path}; the first layout alone: {shlex.join(['python', 'plan.py', *overrides, *given, *found[0]['overrides'].split()])}")
    return found[0] | {"tried": len(found)} | planner.seconds_and_memory(started)


def each(function: Callable[[Config], dict[str, Any]], candidates: Sequence[Config]) -> list[dict[str, Any]]:
    """The function of all, on all processors."""
    processes = min(PROCESSES, os.cpu_count() or 1, len(candidates))
    if processes == 1:
        return [function(candidate) for candidate in candidates]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, candidates))


def attempt(cfg: Config, given: Config, world: int, machine: Machine, imbalance: float | None, fill: float) -> dict[str, Any]:
    """The figures of a layout that computes as little again as its memory allows, and the arguments that make it of what was given."""
    for policy in POLICIES:
        cfg.train.activation_checkpointing = policy
        cfg.train.activation_checkpointing_encoder = "none" if policy == "none" else "full"
        with suppress(TooMuch):
            plan = planner.plan(cfg, world, machine, imbalance, fill, to_the_end=policy == POLICIES[-1])
            break
    return planner.figures(plan) | {"layout": layout(cfg), "recomputed": policy, "overrides": changes(given, cfg)}


def changes(before: Config, after: Config) -> str:
    """What a search has chosen otherwise, as arguments."""
    old, new = ({key: getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1]) for key in CHOSEN} for cfg in (before, after))
    return " ".join(f"{key}={new[key]}" for key in CHOSEN if new[key] != old[key])


def read(own: Mapping[str, str], overrides: Sequence[str]) -> tuple[Config, int, Machine]:
    """Configuration, ranks and GPU."""
    try:
        cfg, missing = config.load(overrides)
    except config.ConfigError as error:
        raise Refused(str(error)) from error
    refuse([sentence for sentence in missing if not sentence.startswith(NEEDED_BY_RUNS_ALONE)])
    name = own.get("gpu", "h100").lower()
    if name not in MACHINES:
        raise Refused(f"gpu={name} is unknown; choose one of {', '.join(MACHINES)}")
    for key in ("world", "row"):
        if not own.get(key, "1").isdecimal() or int(own.get(key, "1")) < 1:
            raise Refused(f"{key}={own[key]} is no number of {'ranks' if key == 'world' else 'tokens'}; give one of at least 1")
    if cfg.compile.one_graph:
        raise Refused("compile.scope=step makes one graph of a step, which is not planned; choose compile.scope=layer")
    for key in ("activation_checkpointing", "activation_checkpointing_encoder"):
        if kept_share(getattr(cfg.train, key)) is not None:
            raise Refused(f"train.{key}={getattr(cfg.train, key)} lets the compiler choose, which is not planned; choose selective")
    if "row" in own:
        cfg = planner.with_row(cfg, int(own["row"]))
    p, machine = cfg.parallel, MACHINES[name]
    fewest = p.pp * math.lcm(p.cp * p.tp * p.dp_replicate, p.ep)
    return cfg, int(own.get("world", fewest if fewest < machine.node else math.lcm(fewest, machine.node))), machine


def picture_path(own: Mapping[str, str]) -> Path:
    """Where the picture goes, in a folder that there is from now on."""
    path = Path(own.get("picture", "runs/plan.png"))
    if path.suffix not in PICTURES:
        raise Refused(f"picture={path} is no kind of picture; let its name end in one of {', '.join(PICTURES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"picture={path} cannot be written ({error.strerror}); choose another place") from error
    return path


def routing(own: Mapping[str, str], cfg: Config) -> tuple[float | None, float]:
    """What is given of the tokens of the fullest expert rank over the mean, and the share of a row's slots that hold tokens."""
    given: dict[str, float] = {}
    for key, least, most in (("imbalance", 1.0, float(cfg.parallel.ep)), ("fill", 0.01, 1.0)):
        try:
            given |= {key: float(own[key])} if key in own else {}
        except ValueError:
            given[key] = math.nan
        if key in given and not least <= given[key] <= most:
            raise Refused(f"{key}={own[key]} is no number from {least} to {most}; give one")
    return given.get("imbalance"), given.get("fill", 1.0)


def refuse(sentences: Sequence[str]) -> None:
    if sentences:
        raise Refused(*sentences)


def most_promising(cfg: Config, world: int, machine: Machine) -> list[Config]:
    """All layouts, by a guess: state that leaves no room last, then the seconds of a token."""
    leaves = [(math.prod(leaf.shape), "experts" in leaf.axes) for _, leaf in params.named_leaves(speech_lm.spec(cfg))]
    return sorted(planner.layouts(cfg, world), key=lambda c: _promise(c, world, machine, leaves))


def _promise(cfg: Config, world: int, machine: Machine, leaves: Sequence[tuple[int, bool]]) -> tuple[bool, float]:
    p, d = cfg.parallel, cfg.model.decoder
    shards, tokens = world // p.dp_replicate, cfg.data.rows[-1].tokens / (p.cp * p.tp)
    state = sum(STATE_BYTES[offload_of(cfg)] * n / max(shards, p.ep if routed else 1) for n, routed in leaves)
    whole = sum(2.0 * n / (p.ep if routed else p.tp) for n, routed in leaves)
    state += whole / p.pp if p.zero_stage != 3 else 0.0
    moved = sum(2.0 * n / (p.ep if routed else p.tp) for n, routed in leaves if not routed or shards > p.ep)
    gathered = (3 if p.zero_stage != 3 else 4) * moved / tokens  # once or twice in bf16, and their gradients once in fp32
    exchanged = d.pattern.count("E") * (p.ep - 1) * (0.6 if p.ep_dispatch == "alltoall" else 1.0) * d.d_model * 8
    exchanged += len(d.pattern) * d.d_model * 8 * ((p.tp - 1) + (p.cp > 1))
    active = sum(n * (d.top_k / d.n_experts if routed else 1.0) for n, routed in leaves)
    computing = 6 * active / (PRODUCTS * machine.flops) * (1 + (p.pp - 1) / cfg.train.accumulate)
    far = shards > machine.node
    gathering = gathered / (LINKS * (min(machine.link, machine.network * machine.node) if far else machine.link))
    exchanging = exchanged / (LINKS * (machine.network if max(p.ep, p.tp * p.cp) > machine.node else machine.link))
    return state > 0.9 * machine.memory_bytes, computing + gathering + exchanging


def layout(cfg: Config) -> str:
    """What is not 1 or the default."""
    p = cfg.parallel
    named = [f"{key}={getattr(p, key)}" for key in ("pp", "dp_replicate", "cp", "tp", "ep") if getattr(p, key) > 1]
    rows = [f"accumulate={cfg.train.accumulate}"] if cfg.train.accumulate > 1 else []
    return " ".join([f"zero_stage={p.zero_stage}", *named, *([f"ep_dispatch={p.ep_dispatch}"] if p.ep > 1 else []), *rows])


def memory(plan: Plan) -> list[dict[str, Any]]:
    """What the peak consists of."""
    rows = [{"what": what, "at the peak": size / GIB, "before the step": plan.trace.state[what] / GIB}
            for what, size in plan.trace.at_peak.most_common() if size]
    total = {"what": f"all, of {plan.machine.memory_bytes / GIB:.1f}", "at the peak": plan.peak_bytes / GIB,
             "before the step": plan.trace.state.total() / GIB}
    host = {"what": "on the host, beside it", "at the peak": plan.trace.host_peak_bytes / GIB,
            "before the step": plan.trace.host_state_bytes / GIB}
    return [*rows, total, *([host] if plan.trace.host_peak_bytes else [])]


def places(plan: Plan) -> list[dict[str, Any]]:
    """Memory and time of each rank of a pipeline."""
    return [{"rank of pp": place, "peak GiB": (trace.peak_bytes + RESERVED_BYTES) / GIB, "compute ms": 1e3 * t.compute,
             "exposed communication ms": 1e3 * t.exposed, "bubble ms": 1e3 * t.bubble}
            for place, (trace, t) in enumerate(zip(plan.traces, plan.all_times, strict=True))]


def times(plan: Plan) -> list[dict[str, Any]]:
    """Milliseconds, and the layers that take most of them."""
    t = plan.times
    parts = {"all": t.total, "compute": t.compute, "exposed communication": t.exposed, "hidden communication": t.hidden}
    parts |= {"bubble": t.bubble} if len(plan.traces) > 1 else {}
    return [{"what": name, "ms": 1e3 * seconds} for name, seconds in [*parts.items(), *slowest(t)]]


def slowest(t: Times) -> list[tuple[str, float]]:
    """The eight graphs that take longest."""
    return sorted(t.by_graph.items(), key=lambda item: -item[1])[:8]


def picture(plan: Plan, path: Path) -> None:
    """What memory and time consist of."""
    parts = [*slowest(plan.times), ("exposed communication", plan.times.exposed)]
    bars(path, f"{layout(plan.cfg)}, {plan.world} ranks, {round(plan.tokens_per_second):,} tokens/s/GPU at most",
         {"memory at the peak (GiB)": {name: size / GIB for name, size in plan.trace.at_peak.most_common() if size > 0},
          "a step (ms)": {name: 1e3 * seconds for name, seconds in parts}})


def picture_of_layouts(found: Sequence[Mapping[str, Any]], machine: Machine, path: Path) -> None:
    """Memory and speed of the layouts of a search."""
    names = [f"{f['layout']}\nrecomputed: {f['recomputed']}{'' if f['fits'] else ', does not fit'}" for f in found]
    bars(path, f"layouts of {found[0]['ranks']} ranks",
         {f"memory at the peak (GiB of {machine.memory_bytes / GIB:.1f})": {n: f["peak_gib"] for n, f in zip(names, found, strict=True)},
          "tokens/s/GPU at most": {n: f["tokens_per_second_per_gpu"] for n, f in zip(names, found, strict=True)}})


def bars(path: Path, title: str, panels: Mapping[str, Mapping[str, float]]) -> None:
    """A picture of horizontal bars, a panel beside the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5))
    for axes, (name, values) in zip(all_axes, panels.items(), strict=True):
        axes.barh(list(values), list(values.values()))
        axes.invert_yaxis()
        axes.set_title(name)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
