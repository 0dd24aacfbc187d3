"""Every rule that a configuration must satisfy, checked before any process group or GPU is taken.

A rule is a function of (config, environment) that yields a sentence for each violation: key, value, what would work. Above it stand
examples, one for each of its sentences; `python -m parallel.validate --rules` prints them all.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from configs.schema import Config, EncoderConfig, QFormerConfig, RowSize
from model import freezing, lora, params, speech_lm
from parallel.names import ZERO_STAGES, offloaded, schedule, zero_stage
from parallel.pipeline import rounds


@dataclass(frozen=True)
class Environment:
    """What a rule may know besides the configuration."""

    world: int = 1  # processes
    command: str = "train.py"  # as typed, without the launcher


Check = Callable[[Config, Environment], Iterator[str]]
Example = Mapping[str, object]  # what is changed in SOUND, and "world"
SOUND = Config(run_dir="runs/x")  # breaks no rule on one process
SOUND.data.rows = [RowSize(tokens=100, audio_frames=90, utterances=4, utterance_frames=40, label_tokens=20)]


@dataclass(frozen=True)
class Rule:
    """What is checked, and what breaks it: an example for each kind of sentence."""

    check: Check
    examples: tuple[Example, ...]
    listed: bool  # it is about parameters, which can be listed once the sizes are right


RULES: list[Rule] = []


def rule(*examples: Example, listed: bool = False) -> Callable[[Check], Check]:
    """Registers a rule."""
    def register(check: Check) -> Check:
        RULES.append(Rule(check, examples, listed))
        return check

    return register


CHOICES = {
    "precision": ("bf16", "fp32", "fp64"),
    "compile.scope": ("layer", "step"),
    "data.kind": ("manifest", "text", "digits"),
    "data.channels": ("mean", "first", "error"),
    "data.on_bad_audio": ("fail", "skip"),
    "data.on_bad_text": ("fail", "skip"),
    "data.on_too_long": ("fail", "skip"),
    "model.encoder.kind": ("fastconformer", "whisper", "whisper_30s", "glm_asr", "glm_asr_30s"),
    "parallel.cp_split": ("row", "document"),
    "parallel.ep_dispatch": ("allgather", "alltoall"),
    "parallel.reduce_dtype": ("fp32", "bf16"),
    "optimizer.master_dtype": ("fp32", "bf16"),
    "optimizer.moment_dtype": ("fp32", "bf16"),
    "train.activation_checkpointing": ("none", "selective", "full"),
    "train.activation_checkpointing_encoder": ("none", "selective", "full"),
    "model.encoder.conv_norm": ("batch_norm", "layer_norm"),
    "model.decoder.activation": ("relu2", "swiglu"),
    "model.decoder.router": ("sigmoid", "softmax"),
    "model.decoder.rope_scaling.kind": ("none", "linear", "llama3", "yarn", "dynamic", "longrope"),
}
AT_LEAST_ONE = (
    "parallel.dp_replicate", "parallel.pp", "parallel.pp_chunks", "parallel.cp", "parallel.tp", "parallel.ep",
    "train.steps", "train.accumulate", "train.log_every", "train.keep_checkpoints", "generation.max_new_tokens",
    "data.timeout_sec", "data.multiple",
    "model.encoder.mel_bins", "model.encoder.d_model", "model.encoder.n_heads", "model.encoder.ff_expansion", "model.encoder.conv_kernel",
    "model.encoder.max_positions",
    "model.encoder.subsampling_channels", "model.decoder.d_model", "model.decoder.vocab_size", "model.decoder.n_heads",
    "model.decoder.n_kv_heads", "model.decoder.head_dim", "model.decoder.mamba_heads", "model.decoder.mamba_head_dim",
    "model.decoder.mamba_groups", "model.decoder.mamba_state", "model.decoder.mamba_conv", "model.decoder.mamba_chunk",
    "model.decoder.n_experts", "model.decoder.top_k", "model.decoder.moe_ffn", "model.decoder.n_group", "model.decoder.topk_group",
    "model.decoder.window", "model.decoder.vocab_multiple", "model.decoder.rope_scaling.factor",
    "model.decoder.rope_scaling.trained_positions",
)
NOT_NEGATIVE = (
    "data.workers", "data.max_skipped", "data.curriculum_steps", "train.ctc_weight", "train.validate_every", "train.decode_every",
    "train.checkpoint_every", "optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm",
    "model.lora.rank", "model.lora.alpha", "model.lora.dropout", "generation.temperature",
    "model.encoder.n_layers", "model.projector.hidden", "model.decoder.mlp_ffn", "model.decoder.shared_ffn", "model.decoder.moe_latent",
    "model.decoder.bias_update_rate",
)


def value(cfg: Config, key: str) -> object:
    """The value under a dotted key."""
    result: object = cfg
    for part in key.split("."):
        result = getattr(result, part)
    return result


def present(cfg: Config, keys: Iterable[str]) -> list[str]:
    """The keys without those of an encoder that the model does not have."""
    return [key for key in keys if cfg.model.encoder is not None or not key.startswith("model.encoder.")]


@rule({"precision": "fp16"},
      {"compile.scope": "graph"})
def choices(cfg: Config, environment: Environment) -> Iterator[str]:
    for key in present(cfg, CHOICES):
        if key == "precision" and str(cfg.precision).startswith(("fp16", "16")):
            yield f"precision={cfg.precision} needs a loss scaler, which is not here; choose bf16, which needs none and is as fast"
        elif value(cfg, key) not in CHOICES[key]:
            yield f"{key}={value(cfg, key)} is unknown; choose one of {', '.join(CHOICES[key])}"


@rule({"train.accumulate": 0})
def ranges(cfg: Config, environment: Environment) -> Iterator[str]:
    for keys, least in ((AT_LEAST_ONE, 1), (NOT_NEGATIVE, 0)):
        for key in present(cfg, keys):
            number = value(cfg, key)
            if not isinstance(number, (int, float)) or number < least:
                yield f"{key}={number} is too small; it must be at least {least}"


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
                   f"type torchrun --nproc_per_node={math.ceil(world / needed) * needed} {environment.command}")
    dp = world // (p.pp * p.cp * p.tp)
    if not world % (p.pp * p.cp * p.tp) and dp % p.dp_replicate:
        yield f"parallel.dp_replicate={p.dp_replicate} does not divide the {dp} data-parallel ranks; choose a divisor of {dp}"
    if p.ep > 1 and cfg.model.decoder.n_experts % p.ep:
        experts = cfg.model.decoder.n_experts
        yield f"parallel.ep={p.ep} does not divide model.decoder.n_experts={experts}; choose a divisor of {experts}"


@rule({"parallel.pp": 2, "parallel.pp_schedule": "zero_bubble", "world": 2},
      {"parallel.pp_chunks": 2},
      {"parallel.pp": 2, "parallel.pp_schedule": "interleaved_1f1b", "world": 2},
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
    stages, looped = p.pp * p.pp_chunks, name in ("interleaved_1f1b", "looped_bfs")
    if looped != (p.pp_chunks > 1):
        yield (f"parallel.pp_schedule={p.pp_schedule} has {'two or more stages' if looped else 'one stage'} a rank and "
               f"parallel.pp_chunks={p.pp_chunks}; set it to {2 if looped else 1}" + ("" if looped else ", or choose interleaved_1f1b"))
    given = list(p.pp_layers)
    if given and (len(given) != stages or sum(given) != layers or min(given[1:-1], default=1) < 1 or min(given) < 0):
        yield (f"parallel.pp_layers={given} must give {stages} stages {layers} layers together, at least 1 to each but the first and the "
               "last; or leave it empty")
    elif layers < stages - 2:
        yield f"model.decoder.pattern has {layers} layers, too few for {stages} stages; choose a smaller parallel.pp or parallel.pp_chunks"
    if name == "interleaved_1f1b" and cfg.train.accumulate % rounds(p.pp, cfg.train.accumulate):
        wanted = cfg.train.accumulate // p.pp * p.pp
        yield (f"train.accumulate={cfg.train.accumulate} makes no equal rounds for parallel.pp_schedule={p.pp_schedule} over {p.pp} ranks; "
               f"choose {wanted} or {wanted + p.pp}")
    if cfg.compile.enabled and cfg.compile.scope == "step":
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
    one_graph = cfg.compile.enabled and cfg.compile.scope == "step"
    if one_graph and stage in (1, 2):
        yield (f"parallel.zero_stage={p.zero_stage} keeps weights from row to row, and compile.scope=step makes a graph a row; choose "
               "compile.scope=layer, or zero stage 0 or 3")
    if one_graph and p.defer_grad_sync is True:
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
    if found != "none" and cfg.compile.enabled and cfg.compile.scope == "step":
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
    if cfg.compile.enabled and cfg.compile.scope == "step":
        yield "optimizer.master_dtype=bf16 would round gradients in the graph of compile.scope=step; choose fp32, or compile.scope=layer"


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
    for key, parts in sorted({rule for letter in d.pattern for rule in letters.get(letter, ())}):
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


@rule({"model.encoder": None, "data.kind": "text", "train.ctc_weight": 0.1},
      {"model.encoder.n_heads": 3},
      {"model.encoder.conv_kernel": 4},
      {"model.encoder.d_model": 1023, "model.encoder.n_heads": 1},
      {"model.encoder.kind": "whisper", "train.ctc_weight": 0.1},
      {"model.encoder.kind": "whisper", "model.encoder.max_positions": 100})
def encoder(cfg: Config, environment: Environment) -> Iterator[str]:
    e = cfg.model.encoder
    if e is None:
        if cfg.train.ctc_weight > 0:
            yield f"train.ctc_weight={cfg.train.ctc_weight} needs frames of an encoder and model.encoder=null; set it to 0"
        return
    if e.n_heads >= 1 and e.d_model % e.n_heads:
        yield f"model.encoder.n_heads={e.n_heads} does not divide model.encoder.d_model={e.d_model}; choose a divisor"
    if e.conv_kernel % 2 == 0:
        yield f"model.encoder.conv_kernel={e.conv_kernel} is even; choose an odd number, so that the convolution is centred"
    if e.d_model % 2:
        yield f"model.encoder.d_model={e.d_model} is odd; positions need an even width"
    frames_of_20_ms = e.kind.startswith(("whisper", "glm_asr"))
    if frames_of_20_ms and cfg.train.ctc_weight > 0:
        yield f"train.ctc_weight={cfg.train.ctc_weight} needs frames of a fastconformer and model.encoder.kind={e.kind}; set it to 0"
    longest = max((row.utterance_frames for row in cfg.data.rows), default=0) * 4
    if e.kind.startswith("whisper") and longest > e.max_positions:
        yield (f"data.rows holds utterances of {longest} frames of 20 ms and model.encoder.max_positions={e.max_positions}; "
               f"set utterance_frames to {e.max_positions // 4} at most")


@rule({"data.queries": 8},
      {"model.encoder.kind": "glm_asr", "model.projector.conformer": EncoderConfig()},
      {"model.projector.hidden": 8, "model.projector.encoder_layers": [31]},
      {"model.projector.qformer": QFormerConfig(64), "data.queries": 64},
      {"model.projector.encoder_layers": [3, 30]},
      {"model.projector.encoder_layers": [3, 31], "train.ctc_weight": 0.1},
      {"model.projector.qformer": QFormerConfig(64, n_heads=7), "model.projector.encoder_layers": [31], "data.queries": 64},
      {"model.projector.conformer": EncoderConfig(conv_kernel=4)})
def projector(cfg: Config, environment: Environment) -> Iterator[str]:
    e, p = cfg.model.encoder, cfg.model.projector
    parts = {"encoder_layers": p.encoder_layers, "conformer": p.conformer.n_layers, "qformer": p.qformer.queries}
    used = [key for key, there in parts.items() if there]
    if cfg.data.queries != p.qformer.queries:
        yield f"data.queries={cfg.data.queries} is not model.projector.qformer.queries={p.qformer.queries}; leave it to configs/config.yaml"
    if e is None or not used:
        return
    if e.kind != "fastconformer":
        yield f"model.projector.{used[0]} needs frames of a fastconformer and model.encoder.kind={e.kind}; leave it out"
    if p.hidden or (p.conformer.n_layers and len(used) > 1):
        other = f"hidden={p.hidden}" if p.hidden else "conformer"
        yield f"model.projector.{other} cannot be had with model.projector.{used[-1] if p.hidden else used[0]}; leave one of them out"
    read, last = list(p.encoder_layers), e.n_layers - 1
    if p.qformer.queries and not read:
        yield f"model.projector.encoder_layers is empty and model.projector.qformer reads them; name layers, such as [{last}]"
    if read and (read != sorted(read) or read[0] < 0 or read[-1] != last):
        yield (f"model.projector.encoder_layers={read} must be layers from 0 in order, up to the last, {last}: what is behind would learn "
               "nothing")
    if read and cfg.train.ctc_weight > 0:
        yield f"train.ctc_weight={cfg.train.ctc_weight} needs one layer and model.projector.encoder_layers names several; set it to 0"
    q, c = p.qformer, p.conformer
    if q.queries and (min(q.queries, q.n_layers, q.n_heads, q.ffn) < 1 or e.d_model % q.n_heads):
        yield f"model.projector.qformer={vars(q)} needs numbers above 0 and n_heads a divisor of model.encoder.d_model={e.d_model}"
    if c.n_layers and (min(c.n_layers, c.n_heads) < 1 or c.d_model % (2 * c.n_heads) or c.conv_kernel % 2 == 0):
        yield ("model.projector.conformer needs a layer, an odd conv_kernel and a d_model that is an even multiple of n_heads; it has "
               f"n_layers={c.n_layers}, conv_kernel={c.conv_kernel}, d_model={c.d_model}, n_heads={c.n_heads}")


@rule({"model.decoder.pattern": "MX"},
      {"model.decoder.n_kv_heads": 3},
      {"model.decoder.n_experts": 4},
      {"model.decoder.topk_group": 2},
      {"model.decoder.n_group": 128, "model.decoder.topk_group": 8},
      {"model.decoder.pattern": "M-"},
      {"model.decoder.head_dim": 63, "model.decoder.rope_theta": 1e4},
      {"model.decoder.rope_fraction": 1.5},
      {"model.decoder.rope_scaling.kind": "longrope"},
      {"model.decoder.bias_update_rate": 0.1, "model.decoder.router_bias": False})
def decoder(cfg: Config, environment: Environment) -> Iterator[str]:
    d = cfg.model.decoder
    unknown = sorted(set(d.pattern) - set("M*WE-"))
    if unknown or not d.pattern:
        yield (f"model.decoder.pattern={d.pattern!r} has no or unknown letters {unknown}; use M Mamba-2, * attention, W attention within a "
               "window, E experts, - MLP")
    for small, large in (("n_kv_heads", "n_heads"), ("mamba_groups", "mamba_heads"), ("n_group", "n_experts")):
        if getattr(d, small) >= 1 and getattr(d, large) % getattr(d, small):
            yield f"model.decoder.{small}={getattr(d, small)} does not divide model.decoder.{large}={getattr(d, large)}; choose a divisor"
    allowed = d.n_experts // max(1, d.n_group) * d.topk_group
    if d.top_k > allowed:
        yield f"model.decoder.top_k={d.top_k} is more than the {allowed} experts that a token may choose from"
    if d.topk_group > d.n_group:
        yield f"model.decoder.topk_group={d.topk_group} is more than model.decoder.n_group={d.n_group}"
    if d.n_group > 1 and d.n_experts // d.n_group < 2:
        yield f"model.decoder.n_group={d.n_group} leaves fewer than the 2 experts that a group needs; choose at most {d.n_experts // 2}"
    if "-" in d.pattern and d.mlp_ffn < 1:
        yield f"model.decoder.mlp_ffn={d.mlp_ffn} but the pattern has a dense MLP; give its hidden width"
    rotated = int(d.head_dim * d.rope_fraction)
    if d.rope_theta is not None and d.head_dim % 2:
        yield f"model.decoder.head_dim={d.head_dim} is odd; rotary positions need an even size"
    elif not 0 < d.rope_fraction <= 1 or rotated % 2:
        yield (f"model.decoder.rope_fraction={d.rope_fraction} rotates {rotated} of the {d.head_dim} numbers of a head; "
               "rotary positions need an even number of them")
    factors = [len(d.rope_scaling.short_factors), len(d.rope_scaling.long_factors)]
    if d.rope_scaling.kind == "longrope" and factors != [rotated // 2, rotated // 2]:
        yield (f"model.decoder.rope_scaling has {factors[0]} short_factors and {factors[1]} long_factors; longrope needs "
               f"{rotated // 2} of each, half of the numbers of a head that are rotated")
    if d.bias_update_rate > 0 and not d.router_bias:
        yield (f"model.decoder.bias_update_rate={d.bias_update_rate} moves a score correction, which model.decoder.router_bias=false "
               "leaves out; change one of the two")


@rule({"data.rows": []},
      {"data.kind": "text"},
      {"data.rows": [RowSize(100, 90, 0, 40, 20)]},
      {"data.rows": [RowSize(100, 90, 4, 90, 20)]},
      {"data.rows": [RowSize(200, 90, 4, 40, 20), RowSize(100, 90, 4, 40, 20)]})
def rows(cfg: Config, environment: Environment) -> Iterator[str]:
    if not cfg.data.rows:
        yield "data.rows is empty; give at least one row size {tokens, audio_frames, utterances, utterance_frames, label_tokens}"
    if (cfg.data.kind == "text") != (cfg.model.encoder is None):
        yield (f"data.kind={cfg.data.kind} does not fit a model {'without' if cfg.model.encoder is None else 'with'} an encoder; "
               "model.encoder=null reads data.kind=text, and nothing else does")
        return
    audio = () if cfg.model.encoder is None else ("audio_frames", "utterance_frames", "label_tokens")
    for i, row in enumerate(cfg.data.rows):
        small = [name for name in ("tokens", "utterances", *audio) if getattr(row, name) < 1]
        if small:
            yield f"data.rows[{i}].{small[0]}={getattr(row, small[0])} is too small; it must be at least 1"
        if audio and row.utterance_frames >= min(row.audio_frames, row.tokens):
            yield (f"data.rows[{i}].utterance_frames={row.utterance_frames} does not fit a row of {row.tokens} tokens and "
                   f"{row.audio_frames} audio frames; make the row longer or the longest utterance shorter")
    sizes = [(r.tokens, r.audio_frames) for r in cfg.data.rows]
    if sizes != sorted(set(sizes)):
        yield f"data.rows has sizes {sizes}; list different sizes, smallest first"


@rule({"model.freeze_params": ["llm"]},
      {"model.freeze_params": [""], "model.encoder.freeze_batch_norm": True},
      {"model.freeze_params": [r"encoder\.layers\.3\."]},
      listed=True)
def frozen(cfg: Config, environment: Environment) -> Iterator[str]:
    if not cfg.model.freeze_params and not cfg.model.prevent_freeze_params:
        return
    leaves = [(name, p) for name, p in params.named_leaves(speech_lm.spec(cfg)) if p.kind == "param"]
    examples = {name.partition(".")[0]: name for name, _ in leaves}
    for key in ("freeze_params", "prevent_freeze_params"):
        for pattern in freezing.unmatched([name for name, _ in leaves], getattr(cfg.model, key)):
            yield f"model.{key} holds {pattern!r}, which matches no parameter; their names are like {', '.join(examples.values())}"
    if not any(p.trained for _, p in leaves):
        yield f"model.freeze_params={cfg.model.freeze_params} freezes every parameter; name some in model.prevent_freeze_params"
    norms = [name for name, p in leaves if name.endswith("conv.batch_norm.weight") and not p.trained]
    for key, e in (("encoder", cfg.model.encoder), ("projector.conformer", cfg.model.projector.conformer)):
        own = [name for name in norms if name.startswith(key.partition(".")[0] + ".")]
        if own and e is not None and e.conv_norm == "batch_norm" and not e.freeze_batch_norm:
            yield f"model.freeze_params freezes {own[0]} but its running statistics would move; set model.{key}.freeze_batch_norm=true"


@rule({"model.lora.rank": 4, "model.lora.targets": []},
      {"model.lora.rank": 4, "model.lora.targets": ["q_proj"]},
      {"model.lora.rank": 4, "model.lora.ranks": {"encoder": 2}},
      {"model.lora.rank": 4, "model.lora.dropout": 1.0},
      {"model.lora.rank": 4, "model.lora.dora": True, "model.decoder.pattern": "E"},
      listed=True)
def adapters(cfg: Config, environment: Environment) -> Iterator[str]:
    low = cfg.model.lora
    if not low.rank:
        return
    spec = speech_lm.spec(cfg)
    some = ", ".join(list(lora.targets(spec, [""]))[-8:])
    if not low.targets:
        yield f"model.lora.targets is empty and model.lora.rank={low.rank}; name projections like {some}, or set the rank to 0"
    for pattern in low.targets:
        if not lora.targets(spec, [pattern]):
            yield f"model.lora.targets holds {pattern!r}, which matches no projection; their names are like {some}"
    for pattern in low.ranks:
        if not lora.targets(lora.targets(spec, low.targets), [pattern]):
            yield f"model.lora.ranks holds {pattern!r}, which matches no projection of model.lora.targets; their names are like {some}"
    if low.dropout >= 1:
        yield f"model.lora.dropout={low.dropout} drops everything; choose a share below 1"
    experts = [name for name, p in lora.targets(spec, low.targets).items() if "experts" in p.axes]
    for key in ("dora", "dropout"):
        if experts and getattr(low, key):
            yield (f"model.lora.{key}={getattr(low, key)} cannot be had for routed experts, and model.lora.targets matches {experts[0]}; "
                   f"name other targets, or leave out {key}")


@rule({"generation.top_p": 0.0})
def sampling(cfg: Config, environment: Environment) -> Iterator[str]:
    if not 0 < cfg.generation.top_p <= 1:
        yield f"generation.top_p={cfg.generation.top_p} is no share of a probability; choose one above 0 and at most 1"


@rule({"model.lora.ranks": {"decoder": 0}},
      {"model.lora.targets": ["("]})
def patterns(cfg: Config, environment: Environment) -> Iterator[str]:
    for pattern, rank in cfg.model.lora.ranks.items():
        if rank < 1:
            yield f"model.lora.ranks gives {pattern!r} the rank {rank}; choose at least 1"
    for key in ("model.freeze_params", "model.prevent_freeze_params", "model.lora.targets", "model.lora.ranks"):
        for pattern in value(cfg, key):  # type: ignore[attr-defined]
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{key} holds {pattern!r}, which is no regular expression ({error}); write it as Python does"


def validate(cfg: Config, environment: Environment) -> list[str]:
    """Every violation, in one sentence each; empty when the configuration can run in this environment."""
    problems = [sentence for r in RULES if not r.listed for sentence in r.check(cfg, environment)]
    return problems or [sentence for r in RULES if r.listed for sentence in r.check(cfg, environment)]


def broken(example: Example) -> list[str]:
    """What is said about an example."""
    cfg = copy.deepcopy(SOUND)
    for key, new in example.items():
        if key != "world":
            parent, _, name = key.rpartition(".")
            setattr(value(cfg, parent) if parent else cfg, name, new)
    return validate(cfg, Environment(int(str(example.get("world", 1))), "train.py +experiment=NAME"))


def main(arguments: list[str]) -> int:
    """Prints every rule: its name, and what it says about each of its examples."""
    if arguments != ["--rules"]:
        print("usage: python -m parallel.validate --rules", file=sys.stderr)
        return 2
    for r in RULES:
        print(r.check.__name__, *(f"  {sentence}" for example in r.examples for sentence in broken(example)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
