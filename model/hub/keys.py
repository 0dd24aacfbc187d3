"""config.json as data: which of its keys is which of ours, and what it must not say because no formula here follows it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from configs.schema import DecoderConfig, RopeScaling
from model.hub.family import HubError

# ours, theirs, their default where the key may be missing
Keys = Sequence[tuple[str, str] | tuple[str, str, Any]]
# theirs, the values that are served (a missing key or null is always served)
Fixed = Mapping[str, tuple[Any, ...]]

_SCALING = (("factor", "factor"), ("trained_positions", "original_max_position_embeddings"), ("low_frequency", "low_freq_factor"),
            ("high_frequency", "high_freq_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"),
            ("attention_factor", "attention_factor"), ("truncate", "truncate"), ("short_factors", "short_factor"),
            ("long_factors", "long_factor"))
_KINDS = {"default": "none", **{kind: kind for kind in ("linear", "llama3", "yarn", "dynamic", "longrope")}}
_USED = {"none": (), "linear": ("factor",), "llama3": ("factor", "trained_positions", "low_frequency", "high_frequency"),
         "yarn": ("factor", "trained_positions", "beta_fast", "beta_slow", "attention_factor", "truncate"), "dynamic": ("factor",),
         "longrope": ("factor", "trained_positions", "attention_factor", "short_factors", "long_factors")}


def take(content: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Our names and their values; raises HubError with all that are missing."""
    missing = [key[1] for key in keys if len(key) == 2 and content.get(key[1]) is None]
    if missing:
        raise HubError(f"config.json lacks {', '.join(missing)}")
    return {key[0]: key[2] if len(key) == 3 and content.get(key[1]) is None else content[key[1]] for key in keys}


def layers(content: Mapping[str, Any]) -> int:
    """Number of blocks."""
    return int(take(content, [("n", "num_hidden_layers")])["n"])


def expansion(content: Mapping[str, Any], hidden: str, width: str, missing: int | None = None) -> int:
    """How many times `width` the hidden width is, or `missing` where it is not given; raises HubError if that is no whole number."""
    n = take(content, [("d", width), ("ffn", hidden) if missing is None else ("ffn", hidden, missing * content[width])])
    if n["ffn"] % n["d"]:
        raise HubError(f"config.json has {hidden}={n['ffn']}, which is no multiple of {width}={n['d']}")
    return int(n["ffn"] // n["d"])


def give(cfg: Any, keys: Keys) -> dict[str, Any]:
    """Their names and our values."""
    return {key[1]: getattr(cfg, key[0]) for key in keys}


def refuse_others(content: Mapping[str, Any], fixed: Fixed) -> None:
    """Raises HubError with every key whose value is not served."""
    found = [f"{key}={content[key]!r} (served: {' or '.join(map(repr, allowed))})" for key, allowed in fixed.items()
             if content.get(key) is not None and content[key] not in allowed]
    if found:
        raise HubError(f"config.json asks for what is not built here: {', '.join(found)}")


def read_rope(content: Mapping[str, Any], theta: float, fraction: float = 1.0) -> dict[str, Any]:
    """Our rotary keys, from `rope_parameters` or the older `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

    :param theta: the family's default, `fraction` as well
    """
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _KINDS:
        raise HubError(f"config.json asks for rotary positions of type {kind!r}; served are {', '.join(_KINDS)}")
    old = {"rope_theta": theta, "partial_rotary_factor": fraction} | {k: v for k, v in content.items() if v is not None}
    scaling = {ours: rope[theirs] for ours, theirs in _SCALING if ours in _USED[_KINDS[kind]] and rope.get(theirs) is not None}
    positions = content.get("max_position_embeddings")
    if kind == "dynamic":
        scaling |= take(content, [("trained_positions", "max_position_embeddings")])
    if kind in ("llama3", "yarn", "longrope") and "trained_positions" not in scaling and positions is not None:
        scaling["trained_positions"] = positions
    if kind == "yarn":
        scaling = _yarn(rope, scaling, positions)
    if kind == "longrope":
        scaling = _longrope(content, scaling)
    needed = {"default": (), "longrope": ("factor", "short_factors", "long_factors")}
    lacks = [theirs for ours, theirs in _SCALING if ours in needed.get(kind, ("factor",)) and ours not in scaling]
    if lacks:
        raise HubError(f"config.json asks for rotary positions of type {kind!r} and lacks their {', '.join(lacks)}")
    return {"rope_theta": float(rope.get("rope_theta") or old["rope_theta"]),
            "rope_fraction": float(rope.get("partial_rotary_factor") or old["partial_rotary_factor"]),
            "rope_scaling": RopeScaling(kind=_KINDS[kind], **scaling)}


def _yarn(rope: Mapping[str, Any], scaling: dict[str, Any], positions: int | None) -> dict[str, Any]:
    """`scaling` with the factor that follows from the lengths where it is not given, and the attention factor that follows from mscale."""
    if "factor" not in scaling and positions is not None and "original_max_position_embeddings" in rope:
        scaling = scaling | {"factor": positions / scaling["trained_positions"]}
    scales = [float(rope.get(key) or 0) for key in ("mscale", "mscale_all_dim")]
    if all(scales) and "factor" in scaling and "attention_factor" not in scaling:
        growth = 0.1 * math.log(max(scaling["factor"], 1))
        scaling = scaling | {"attention_factor": (scales[0] * growth + 1) / (scales[1] * growth + 1)}
    return scaling


def _longrope(content: Mapping[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """`scaling` with the lengths of pretraining and use as Phi-3 says them, beside the rotary keys."""
    if content.get("original_max_position_embeddings") is not None:
        scaling = scaling | {"trained_positions": content["original_max_position_embeddings"]}
    if "factor" not in scaling and content.get("max_position_embeddings") is not None:
        scaling = scaling | {"factor": content["max_position_embeddings"] / scaling["trained_positions"]}
    return scaling


def write_rope(cfg: DecoderConfig) -> dict[str, Any]:
    """Both forms, for readers of either."""
    kinds = {ours: theirs for theirs, ours in _KINDS.items()}
    used = {f.name: getattr(cfg.rope_scaling, f.name) for f in fields(RopeScaling) if f.name in _USED[cfg.rope_scaling.kind]}
    scaling = {"rope_type": kinds[cfg.rope_scaling.kind], **{theirs: used[ours] for ours, theirs in _SCALING if used.get(ours) is not None}}
    partial = {} if cfg.rope_fraction == 1 else {"partial_rotary_factor": cfg.rope_fraction}
    length = {"max_position_embeddings": cfg.rope_scaling.trained_positions} if cfg.rope_scaling.kind == "dynamic" else {}
    return {"rope_parameters": {"rope_theta": cfg.rope_theta, **scaling, **partial}, "rope_theta": cfg.rope_theta,
            "rope_scaling": None if cfg.rope_scaling.kind == "none" else scaling, **partial, **length}
