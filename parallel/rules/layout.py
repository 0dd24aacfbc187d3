"""Processes, what is split over them, and what of it one graph can hold."""

import math
from collections.abc import Iterator

from configs.schema import Config
from parallel import deepep
from parallel.names import ZERO_STAGES, offloaded, schedule, zero_stage
from parallel.rules import Environment, rule, value
from parallel.schedules import BY_ROUNDS, LOOPED, V_SHAPED, rounds


@rule({"parallel.ep": 8},
      {"parallel.dp_replicate": 3, "world": 4},
      {"parallel.ep": 3, "world": 3})
def processes(cfg: Config, environment: Environment) -> Iterator[str]:
    """Every axis must divide what it divides; the sentence says with how many processes it would."""
    p, world = cfg.parallel, environment.world
    if min(p.pp, p.cp, p.tp, p.ep, p.dp_replicate) < 1:
        return
    groups = [{"pp": p.pp, "cp": p.cp, "tp": p.tp}] + ([{"pp": p.pp, "ep": p.ep}] if p.ep > 1 else [])
    for keys in groups:
        needed = math.prod(keys.values())
        if world % needed:
            verb, named = "is" if world == 1 else "are", " and ".join(f"parallel.{key}={size}" for key, size in keys.items() if size > 1)
            yield (f"{named} needs a number of processes that is a multiple of {needed}, and there {verb} {world}; "
                   f"{environment.start(math.ceil(world / needed) * needed)}")
    dp = world // (p.pp * p.cp * p.tp)
    if not world % (p.pp * p.cp * p.tp) and dp % p.dp_replicate:
        yield f"parallel.dp_replicate={p.dp_replicate} does not divide the {dp} data-parallel ranks; choose a divisor of {dp}"
    if p.ep > 1 and cfg.model.decoder.n_experts % p.ep:
        experts = cfg.model.decoder.n_experts
        yield f"parallel.ep={p.ep} does not divide model.decoder.n_experts={experts}; choose a divisor of {experts}"


@rule({"parallel.pp": 2, "parallel.pp_schedule": "zigzag", "world": 2},
      {"parallel.pp_chunks": 2},
      {"parallel.pp": 2, "parallel.pp_schedule": "interleaved_1f1b", "world": 2},
      {"parallel.pp": 2, "parallel.pp_schedule": "zbv", "world": 2},
      {"parallel.pp": 2, "parallel.pp_chunks": 2, "world": 2},
      {"parallel.pp": 2, "parallel.pp_schedule": "dualpipev", "parallel.pp_chunks": 2, "train.accumulate": 2, "world": 2},
      {"parallel.pp": 2, "parallel.pp_layers": [2, 1], "world": 2},
      {"parallel.pp": 8, "world": 8},
      {"parallel.pp": 2, "parallel.pp_schedule": "interleaved_1f1b", "parallel.pp_chunks": 2, "train.accumulate": 5, "world": 2},
      {"parallel.pp": 2, "compile.scope": "step", "world": 2})
def pipeline(cfg: Config, environment: Environment) -> Iterator[str]:
    """What the stages need of the layers, the rows and the compiler."""
    p, layers = cfg.parallel, len(cfg.model.decoder.pattern)
    try:
        name = schedule(p.pp_schedule)
    except ValueError as error:
        yield f"parallel.pp_schedule={error}"
        return
    if p.pp < 2:
        if p.pp_chunks > 1 or p.pp_layers:
            key = "pp_chunks" if p.pp_chunks > 1 else "pp_layers"
            yield f"parallel.{key}={value(cfg, f'parallel.{key}')} needs a pipeline, and parallel.pp=1; leave it out, or set parallel.pp"
        return
    stages = p.pp * p.pp_chunks
    if name in V_SHAPED:
        if p.pp_chunks != 2:
            yield f"parallel.pp_schedule={p.pp_schedule} has two stages a rank and parallel.pp_chunks={p.pp_chunks}; set it to 2"
    elif name in LOOPED:
        if p.pp_chunks < 2:
            yield f"parallel.pp_schedule={p.pp_schedule} has two or more stages a rank and parallel.pp_chunks={p.pp_chunks}; set it to 2"
    elif p.pp_chunks > 1 and name != "zero_bubble":
        yield (f"parallel.pp_schedule={p.pp_schedule} has one stage a rank and parallel.pp_chunks={p.pp_chunks}; set it to 1, or choose "
               "interleaved_1f1b")
    given = list(p.pp_layers)
    if given and (len(given) != stages or sum(given) != layers or min(given[1:-1], default=1) < 1 or min(given) < 0):
        yield (f"parallel.pp_layers={given} must give {stages} stages {layers} layers together, at least 1 to each but the first and the "
               "last; or leave it empty")
    elif layers < stages - 2:
        yield f"model.decoder.pattern has {layers} layers, too few for {stages} stages; choose a smaller parallel.pp or parallel.pp_chunks"
    if name == "dualpipev" and cfg.train.accumulate < stages:
        yield (f"parallel.pp_schedule={p.pp_schedule} needs as many rows a step as stages, {stages}, and train.accumulate="
               f"{cfg.train.accumulate}; raise it, or choose zbv")
    if name in BY_ROUNDS and cfg.train.accumulate % rounds(p.pp, cfg.train.accumulate):
        wanted = cfg.train.accumulate // p.pp * p.pp
        yield (f"train.accumulate={cfg.train.accumulate} makes no equal rounds for parallel.pp_schedule={p.pp_schedule} over {p.pp} ranks; "
               f"choose {wanted} or {wanted + p.pp}")
    if cfg.compile.one_graph:
        yield f"compile.scope=step makes one graph of the model and parallel.pp={p.pp} cuts it into stages; choose compile.scope=layer"


@rule({"parallel.zero_stage": "fsdp3"},
      {"parallel.zero_stage": 0, "parallel.dp_replicate": 2, "world": 2},
      {"parallel.defer_grad_sync": "always"},
      {"parallel.zero_stage": 2, "compile.scope": "step"},
      {"parallel.defer_grad_sync": True, "compile.scope": "step"})
def sharding(cfg: Config, environment: Environment) -> Iterator[str]:
    p = cfg.parallel
    try:
        stage = zero_stage(p.zero_stage)
    except ValueError as error:
        yield f"parallel.zero_stage={error}"
        return
    if stage == 0 and p.dp_replicate > 1:
        yield f"parallel.dp_replicate={p.dp_replicate} has no meaning with parallel.zero_stage=0, which replicates all; leave it at 1"
    if isinstance(p.defer_grad_sync, str) and p.defer_grad_sync != "auto":
        yield f"parallel.defer_grad_sync={p.defer_grad_sync} is unknown; choose one of auto, true, false"
    if cfg.compile.one_graph and stage in (1, 2):
        yield (f"parallel.zero_stage={p.zero_stage} keeps weights from row to row, and compile.scope=step makes a graph a row; choose "
               "compile.scope=layer, or zero stage 0 or 3")
    if cfg.compile.one_graph and p.defer_grad_sync is True:
        yield ("parallel.defer_grad_sync=true keeps gradients from row to row, and compile.scope=step makes a graph a row; choose "
               "compile.scope=layer, or defer_grad_sync=auto")


@rule({"parallel.offload": "nvme"},
      {"parallel.offload": "optimizer", "compile.scope": "step"},
      {"parallel.offload": "offload_param", "parallel.zero_stage": 2})
def offload(cfg: Config, environment: Environment) -> Iterator[str]:
    """What is on the host comes to the device between layers."""
    p = cfg.parallel
    try:
        found = offloaded(p.offload)
    except ValueError as error:
        yield f"parallel.offload={error}"
        return
    if found != "none" and cfg.compile.one_graph:
        yield f"parallel.offload={p.offload} moves tensors between graphs and compile.scope=step has one; choose compile.scope=layer"
    if found == "parameters" and ZERO_STAGES.get(str(p.zero_stage), p.zero_stage) in (0, 1, 2):
        yield (f"parallel.offload={p.offload} lets weights go after each layer and parallel.zero_stage={p.zero_stage} keeps them; choose "
               "zero stage 3, or parallel.offload=optimizer")


@rule({"optimizer.master_dtype": "bf16", "precision": "fp32"},
      {"optimizer.master_dtype": "bf16", "compile.scope": "step"})
def dtypes(cfg: Config, environment: Environment) -> Iterator[str]:
    if cfg.optimizer.master_dtype != "bf16":
        return
    if cfg.precision != "bf16":
        yield f"optimizer.master_dtype=bf16 is narrower than precision={cfg.precision}, which computes with them; choose fp32"
    if cfg.compile.one_graph:
        yield "optimizer.master_dtype=bf16 would round gradients in the graph of compile.scope=step; choose fp32, or compile.scope=layer"


@rule({"parallel.ep": 2, "parallel.ep_dispatch": "deepep", "world": 2},
      {"parallel.ep": 2, "parallel.ep_dispatch": "deepep", "precision": "fp32", "world": 2, "deep_ep": True},
      {"parallel.ep": 12, "parallel.ep_dispatch": "deepep", "model.decoder.n_experts": 12, "world": 12, "deep_ep": True})
def dispatch(cfg: Config, environment: Environment) -> Iterator[str]:
    """What DeepEP's kernels are made for."""
    p = cfg.parallel
    if p.ep < 2 or p.ep_dispatch != "deepep":
        return
    if not environment.deep_ep:
        yield "parallel.ep_dispatch=deepep needs the package deep_ep and an NVIDIA GPU, which are not here; choose alltoall"
    if cfg.precision != "bf16":
        yield f"parallel.ep_dispatch=deepep sends bf16 alone and precision={cfg.precision}; choose bf16, or alltoall"
    if p.ep not in deepep.RANKS:
        sizes = ", ".join(map(str, deepep.RANKS))
        yield f"parallel.ep_dispatch=deepep is not made for parallel.ep={p.ep}; choose one of {sizes}, or alltoall"


@rule({"compile.cuda_graph": True, "gpu": False},
      {"compile.cuda_graph": True, "parallel.pp": 2, "world": 2},
      {"compile.cuda_graph": True, "parallel.offload": "optimizer"},
      {"compile.cuda_graph": True, "parallel.ep": 2, "parallel.ep_dispatch": "alltoall", "world": 2})
def cuda_graph(cfg: Config, environment: Environment) -> Iterator[str]:
    """What a GPU can repeat without the host: nothing that waits for a value, a message of another rank or the host's memory."""
    p = cfg.parallel
    if not cfg.compile.cuda_graph:
        return
    if not environment.gpu:
        yield "compile.cuda_graph=true records what an NVIDIA GPU does, and there is none; leave it out"
    if p.pp > 1:
        yield f"compile.cuda_graph=true cannot record what parallel.pp={p.pp} sends from stage to stage; leave it out"
    if p.offload != "none":
        yield f"compile.cuda_graph=true cannot record work of the host and parallel.offload={p.offload} has some; leave one out"
    if p.ep > 1 and p.ep_dispatch != "allgather":
        yield f"compile.cuda_graph=true cannot record parallel.ep_dispatch={p.ep_dispatch}, which waits for counts; choose allgather"


@rule({"parallel.cp": 8, "world": 8},
      {"parallel.tp": 5, "model.decoder.pattern": "*", "model.decoder.n_kv_heads": 1, "world": 5},
      {"parallel.cp": 2, "model.decoder.mamba_groups": 3, "model.decoder.mamba_heads": 6, "world": 2})
def layers(cfg: Config, environment: Environment) -> Iterator[str]:
    """cp and tp split heads, columns and slots evenly; of groups that are fewer, several ranks use one."""
    d, cp, tp = cfg.model.decoder, cfg.parallel.cp, cfg.parallel.tp
    if min(cp, tp) < 1 or cp * tp == 1:
        return
    named = " and ".join(f"parallel.{key}={size}" for key, size in (("cp", cp), ("tp", tp)) if size > 1)
    for i, row in enumerate(cfg.data.rows):
        if row.tokens % (2 * cp * tp):
            yield f"data.rows[{i}].tokens={row.tokens} is not a multiple of {2 * cp * tp}, which {named} needs; choose one"
    letters = {"M": (("mamba_heads", cp * tp),), "*": (("n_heads", tp),), "W": (("n_heads", tp),), "-": (("mlp_ffn", tp),),
               "E": (("shared_ffn", tp),)}
    for key, parts in sorted({split for letter in d.pattern for split in letters.get(letter, ())}):
        if getattr(d, key) % parts:
            yield f"model.decoder.{key}={getattr(d, key)} is not a multiple of {parts}, which {named} needs; choose one"
    groups = {"mamba_groups": (tp, cp) if "M" in d.pattern else (), "n_kv_heads": (tp,) if set("*W") & set(d.pattern) else ()}
    for key, splits in groups.items():
        left = getattr(d, key)
        for parts in splits:
            if left % parts and parts % left:
                yield f"model.decoder.{key}={getattr(d, key)} splits over {named} neither evenly nor with whole ranks to a group"
                break
            left = max(1, left // parts)
