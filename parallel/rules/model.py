"""Sizes of layers and of the rows that they read, names of parameters, and how answers are drawn."""

import re
from collections.abc import Iterator

from configs.schema import Config, EncoderConfig, QFormerConfig, RowSize
from model import freezing, lora, params, speech_lm
from parallel.rules import Environment, rule, value


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
