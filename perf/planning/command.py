"""plan.py: reads its arguments, plans, and shows tables and a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from model import params, speech_lm
from parallel.validate import Environment, validate
from perf.planning import planner
from perf.planning.machines import GIB, MACHINES, Machine
from perf.planning.planner import Plan
from perf.planning.timeline import Times
from perf.report import show
from training import config
from training.step import offload_of

NEEDED_BY_RUNS_ALONE = ("data.manifest", "data.tokenizer", "run_dir")
TRIED = 12  # layouts that a search simulates


class Refused(ValueError):
    """Sentences that say what cannot be planned."""


def show_plan(own: Mapping[str, str], overrides: Sequence[str], started: float) -> dict[str, Any]:
    """Plans one configuration and shows it."""
    cfg, world, machine = read(own, overrides)
    refuse(validate(cfg, Environment(world, f"plan.py {' '.join(overrides)}")))
    plan = planner.plan(cfg, world, machine, float(own["imbalance"]) if "imbalance" in own else None)
    show("memory of a rank (GiB)", memory(plan))
    show("communication", planner.communication(plan))
    show("step", times(plan))
    if plan.imbalance != 1.0 or cfg.parallel.ep > 1:
        buffers = planner.expert_buffers(plan)
        show("experts", [{"fullest rank over the mean": plan.imbalance, "kept pre-activations, static bound GiB": buffers["bound"] / GIB,
                          "expected GiB": buffers["expected"] / GIB}])
    path = Path(own.get("picture", "runs/plan.png"))
    picture(plan, path)
    print(f"wrote {path}")
    return planner.figures(plan) | planner.seconds_and_memory(started)


def search(own: Mapping[str, str], overrides: Sequence[str], started: float) -> dict[str, Any]:
    """Simulates the layouts that promise most, and shows them, those that fit first."""
    cfg, world, machine = read(own, overrides)
    candidates = sorted(planner.layouts(cfg, world), key=lambda c: rank(c, world, machine))[:TRIED]
    if not candidates:
        raise Refused(f"no layout of {world} ranks satisfies the rules; try another world or row")
    plans = [planner.plan(c, world, machine) for c in candidates]
    plans.sort(key=lambda p: (not p.fits, -p.tokens_per_second if p.fits else p.peak_bytes))
    show(f"layouts of {world} ranks", [
        {"layout": layout(p.cfg), "fits": p.fits, "peak GiB": p.peak_bytes / GIB, "step ms": 1e3 * p.times.total,
         "tokens/s/GPU": round(p.tokens_per_second), "exposed ms": 1e3 * p.times.exposed} for p in plans])
    return planner.figures(plans[0]) | {"layout": layout(plans[0].cfg), "tried": len(plans)} | planner.seconds_and_memory(started)


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
    if cfg.compile.enabled and cfg.compile.scope == "step":
        raise Refused("compile.scope=step makes one graph of a step, which is not planned; choose compile.scope=layer")
    if cfg.parallel.pp > 1:
        raise Refused(f"parallel.pp={cfg.parallel.pp} cuts the model into stages, which are not planned; choose parallel.pp=1")
    if offload_of(cfg) != "none":
        raise Refused(f"parallel.offload={cfg.parallel.offload} keeps state on the host, which is not planned; choose none")
    if "row" in own:
        cfg = planner.with_row(cfg, int(own["row"]))
    p, machine = cfg.parallel, MACHINES[name]
    fewest = math.lcm(p.cp * p.tp * p.dp_replicate, p.ep)
    return cfg, int(own.get("world", fewest if fewest < machine.node else math.lcm(fewest, machine.node))), machine


def refuse(sentences: Sequence[str]) -> None:
    if sentences:
        raise Refused(*sentences)


def rank(cfg: Config, world: int, machine: Machine) -> tuple[bool, float, int]:
    """A guess, by which a search chooses what to simulate: state that leaves no room last, then what sends most for a token."""
    p, d = cfg.parallel, cfg.model.decoder
    leaves = [(math.prod(leaf.shape), "experts" in leaf.axes) for _, leaf in params.named_leaves(speech_lm.spec(cfg))]
    shards = world // p.dp_replicate
    state = sum(16.0 * n / max(shards, p.ep if routed else 1) for n, routed in leaves)
    if p.zero_stage != 3:
        state += sum(2.0 * n / (p.ep if routed else p.tp) for n, routed in leaves)
    gathered = sum(n / (p.ep if routed else p.tp) for n, routed in leaves) * (1 if p.zero_stage != 3 else 2)
    tokens = cfg.data.rows[-1].tokens / (p.cp * p.tp)
    exchanged = d.pattern.count("E") * tokens * (p.ep - 1) * (0.6 if p.ep_dispatch == "alltoall" else 1.0) * d.d_model * 4
    exchanged += len(d.pattern) * tokens * d.d_model * 8 * ((p.tp > 1) * p.tp + (p.cp > 1))
    return state > 0.9 * machine.memory_bytes, (2.0 * gathered + exchanged) / tokens, p.dp_replicate


def layout(cfg: Config) -> str:
    """What is not 1 or the default."""
    p = cfg.parallel
    named = [f"{key}={getattr(p, key)}" for key in ("dp_replicate", "cp", "tp", "ep") if getattr(p, key) > 1]
    return " ".join([f"zero_stage={p.zero_stage}", *named, *([f"ep_dispatch={p.ep_dispatch}"] if p.ep > 1 else [])])


def memory(plan: Plan) -> list[dict[str, Any]]:
    """What the peak consists of."""
    rows = [{"what": what, "at the peak": size / GIB, "before the step": plan.trace.state[what] / GIB}
            for what, size in plan.trace.at_peak.most_common() if size]
    total = {"what": f"all, of {plan.machine.memory_bytes / GIB:.1f}", "at the peak": plan.peak_bytes / GIB,
             "before the step": plan.trace.state.total() / GIB}
    return [*rows, total]


def times(plan: Plan) -> list[dict[str, Any]]:
    """Milliseconds, and the layers that take most of them."""
    t = plan.times
    parts = {"all": t.total, "compute": t.compute, "exposed communication": t.exposed, "hidden communication": t.hidden}
    return [{"what": name, "ms": 1e3 * seconds} for name, seconds in [*parts.items(), *slowest(t)]]


def slowest(t: Times) -> list[tuple[str, float]]:
    """The eight graphs that take longest."""
    return sorted(t.by_graph.items(), key=lambda item: -item[1])[:8]


def picture(plan: Plan, path: Path) -> None:
    """Memory and time as two bars each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5))
    parts = [{name: size / GIB for name, size in plan.trace.at_peak.most_common() if size > 0},
             dict(slowest(plan.times)) | {"exposed communication": plan.times.exposed}]
    for axes, values, title in ((left, parts[0], "memory at the peak (GiB)"), (right, parts[1], "a step (ms)")):
        scale = 1.0 if axes is left else 1e3
        axes.barh(list(values), [scale * v for v in values.values()])
        axes.invert_yaxis()
        axes.set_title(title)
    figure.suptitle(f"{layout(plan.cfg)}, {plan.world} ranks, {round(plan.tokens_per_second):,} tokens/s/GPU at most")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
