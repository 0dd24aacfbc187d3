"""What the operations of a graph cost at least: floating-point operations, bytes of memory, and room that they need while they run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from perf.cases import Work
from perf.planning.machines import FP32_COST

Values = dict[str, Any]  # arguments of an operator, by name


@dataclass(frozen=True)
class Ring:
    """What a token sees of each rank's part of the row, where these come one after the other."""

    tokens: int  # of a part
    own: float  # keys among those of its own rank
    other: float  # of each other rank


@dataclass(frozen=True)
class Load:
    """What shapes do not say: how much of a static buffer holds data."""

    expert_rows: float  # rows that go through the experts of one rank in one layer
    document_tokens: float  # length of a document of the token row
    utterance_frames: float  # length of an utterance of the audio row
    fill: float = 1.0  # share of the token row's slots that hold tokens
    imbalance: float = 1.0  # tokens of the fullest rank of experts over the mean
    ring: Ring | None = None  # where a row is split over cp


def tensor_bytes(value: Any) -> int:
    """Of a tensor, or of all in a tuple."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else 0


def work(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, load: Load) -> Work:
    """Of one call of an operator that is not fused with its neighbours."""
    values = arguments(target, args, kwargs)
    moved = float(sum(tensor_bytes(v) for v in values.values()) + tensor_bytes(output))
    name = target.__name__.partition(".")[0]
    if name in PRODUCTS:
        flops, share = PRODUCTS[name](values, load)
        return Work(flops * _dearer(values), moved * share)
    counter = flop_registry.get(target._overloadpacket)
    flops = counter(*args, **kwargs, out_val=output) if counter is not None else 0
    return Work(flops * _dearer(values), moved)


def _dearer(values: Values) -> float:
    """Products in fp32 leave the tensor cores; fp64 is not planned for."""
    first = next((v for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()), None)
    return FP32_COST if first is not None and first.element_size() > 2 else 1.0


def _experts(products: float) -> Callable[[Values, Load], tuple[float, float]]:
    """`products` of rows, D and F, of which `experts` has two; and the share of the static buffers that is touched."""
    def count(v: Values, load: Load) -> tuple[float, float]:
        d, f = v["down_EDF"].shape[1:]
        return 2.0 * products / 2 * load.expert_rows * d * (f + (v["up_EFD"].shape[1] if "up_EFD" in v else f)), _used(v, load)

    return count


def _used(v: Values, load: Load) -> float:
    rows = max((t.shape[0] for t in v.values() if isinstance(t, Tensor)), default=1)
    return min(1.0, load.expert_rows / rows)


def _rows(v: Values, load: Load) -> tuple[float, float]:
    return 2.0 * load.expert_rows * v["b_EKN"].shape[1] * v["b_EKN"].shape[2], _used(v, load)


def _groups(v: Values, load: Load) -> tuple[float, float]:
    return 2.0 * load.expert_rows * v["a_XM"].shape[1] * v["b_YN"].shape[1], _used(v, load)


def _attention(products: float) -> Callable[[Values, Load], tuple[float, float]]:
    """`products` of all pairs that see each other."""
    def count(v: Values, load: Load) -> tuple[float, float]:
        q = v["q_ANH"] if "q_ANH" in v else v["q_TNH"]
        return 2.0 * products * q.shape[0] * q.shape[1] * q.shape[2] * _keys_seen(v, len(q), load), 1.0

    return count


def _keys_seen(v: Values, queries: int, load: Load) -> float:
    """By a query on average. Where keys were gathered there are more of them than queries."""
    causal = v.get("causal", False)
    if load.ring is not None and "k_SGH" in v and queries == len(v["k_SGH"]) == load.ring.tokens:
        return load.ring.own if causal else load.ring.other
    return load.document_tokens / 2 if causal else load.utterance_frames


def _ssd(within: float, across: float) -> Callable[[Values, Load], tuple[float, float]]:
    def count(v: Values, load: Load) -> tuple[float, float]:
        (tokens, heads, size), (groups, state) = v["x_TNH"].shape, v["b_TGS"].shape[1:]
        inside = 2.0 * tokens * v["chunk"] * (state * groups + size * heads)
        return within * inside + across * 4.0 * tokens * heads * size * state, 1.0

    return count


def _loss(v: Values, load: Load) -> tuple[float, float]:
    tokens, width = v["h_TD"].shape
    return 2.0 * (1 + v["h_grad"] + v["weight_grad"]) * tokens * width * v["weight_VD"].shape[0], 2.0  # the logits go through memory too


PRODUCTS: dict[str, Callable[[Values, Load], tuple[float, float]]] = {
    "experts": _experts(2), "experts_backward": _experts(4), "experts_triton": _experts(2), "experts_hidden_backward": _experts(1),
    "multiply_rows": _rows, "multiply_groups": _groups,
    "attention": _attention(2), "attention_triton": _attention(2),
    "attention_backward": _attention(5), "attention_triton_backward": _attention(5),
    "relative_attention": _attention(3), "relative_attention_backward": _attention(8),
    "ssd_triton": _ssd(1, 1), "ssd_triton_backward": _ssd(2, 2.5),
    "product_nt": lambda v, load: (2.0 * v["x_TI"].numel() * v["w_OI"].shape[0], 1.0),
    "product_nn": lambda v, load: (2.0 * v["dy_TO"].numel() * v["w_OI"].shape[1], 1.0),
    "product_tn": lambda v, load: (2.0 * v["dy_TO"].numel() * v["x_TI"].shape[1], 1.0),
    "linear_cross_entropy": _loss, "linear_cross_entropy_triton": _loss,
}


def workspace(target: Any, values: Values) -> int:
    """Bytes that an operator of ours takes and gives back while it runs."""
    name = target.__name__.partition(".")[0]
    if name == "experts_triton":
        rows, (d, f), width = values["token_R"].shape[0], values["down_EDF"].shape[1:], values["x_TD"].element_size()
        return rows * (f + d) * width
    if name == "ssd_triton_backward":
        states = values["states_PNHS"]
        return 2 * math.prod(states.shape[1:]) * math.ceil(values["x_TNH"].shape[0] / values["chunk"]) * states.element_size()
    if name == "hand_on":
        return tensor_bytes(values["parts"])  # the copies that are sent
    if name.startswith("linear_cross_entropy"):
        (tokens, _), rows = values["h_TD"].shape, values["weight_VD"].shape[0]
        gradient = 4 * values["weight_VD"].numel() if values["weight_grad"] else 0
        return min(tokens, values["chunk"]) * rows * values["h_TD"].element_size() + gradient
    return 0


def arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """By name, defaults included."""
    named = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return named | {a.name: v for a, v in zip(target._schema.arguments, args, strict=False)} | kwargs


def changed(target: Any, values: Values) -> list[Any]:
    """Arguments that an operator writes into; of gradients, AdamW declares it and does it with a scale alone."""
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [values[name] for name in written if name != "grads" or values["grad_scale"] is not None]


def is_pointwise(target: Any) -> bool:
    """Whether a compiler runs it in one pass with its neighbours."""
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(target, "__name__", "").partition(".")[0] in FUSED


FUSED = {"sum", "mean", "amax", "amin", "any", "all", "var_mean", "var", "argmax", "full", "full_like", "zeros", "arange", "iota",
         "scalar_tensor", "constant_pad_nd", "index", "gather", "cat", "clone", "copy", "lift_fresh_copy", "empty", "ones",
         "new_zeros", "new_full", "slice_scatter", "select_scatter", "convert_element_type", "_to_copy", "cumsum", "rev", "flip",
         "tril", "embedding", "broadcast_in_dim", "prod", "where"}
