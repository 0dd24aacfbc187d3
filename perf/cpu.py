"""CPU versions of the operations, forward and backward, at the sizes of the step benchmark, against what others would call there.

Both sides see the same inputs and gradients, must agree, and take turns in one process; ours is compiled as the trainer compiles it, theirs
is the faster of eager and compiled. Cross-entropy is compared with F.cross_entropy on all logits, in time and in peak memory.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import attention
from kernels.conv1d import causal_conv1d
from kernels.experts import experts
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.ssd import ssd
from perf import report
from perf.calls import error
from perf.nemotron import CONFIG
from perf.timing import alternate, seconds
from training.step import DTYPES

DOCUMENTS, TOKENS = 4, 512
ROWS = DOCUMENTS * TOKENS
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Function = Callable[..., Tensor]


@dataclass
class Contest:
    """The same result of `inputs`, by us and by them; floating-point inputs get gradients."""

    name: str
    inputs: list[Tensor]
    ours: Function
    theirs: Function
    compiles: bool = True  # theirs does


def run(dtype: str, rounds: int = 15) -> tuple[dict[str, Any], bool]:
    """How many times as fast as theirs each is, and the memory and time of cross-entropy over theirs."""
    torch.manual_seed(0)
    rows, result, valid = [], {}, True
    for contest in contests(DTYPES[dtype]):
        difference = _difference(contest)
        valid &= difference <= AGREEMENT[DTYPES[dtype]]
        times, winner = _race(contest, rounds)
        rows.append({"operation": contest.name, "ours ms": 1e3 * times["ours"], "theirs ms": 1e3 * times["theirs"], "theirs is": winner,
                     "ratio": times["theirs"] / times["ours"], "difference": difference})
        if contest.name == "cross_entropy":
            result["cross_entropy_time"] = round(times["ours"] / times["theirs"], 3)
            result["cross_entropy_memory"] = round(peak_bytes(_pass(contest.ours, contest.inputs))
                                                   / peak_bytes(_pass(contest.theirs, contest.inputs)), 3)
        else:
            result[contest.name] = round(times["theirs"] / times["ours"], 3)
    report.show(f"Forward and backward, {ROWS} tokens, {dtype}, {torch.get_num_threads()} threads", rows)
    if not valid:
        return {"differences": {row["operation"]: row["difference"] for row in rows}}, False
    return {**result, "dtype": dtype, "threads": torch.get_num_threads()}, True


def contests(dtype: torch.dtype) -> Iterator[Contest]:
    """The operations of the step benchmark's decoder."""
    cfg = CONFIG
    documents = torch.arange(ROWS, dtype=torch.int32) // TOKENS
    ends = torch.arange(0, ROWS + 1, TOKENS, dtype=torch.int32)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape)).to(dtype).requires_grad_()

    ids = torch.rand(ROWS, cfg.n_experts).topk(cfg.top_k).indices
    shares = torch.rand(ROWS, cfg.top_k).requires_grad_()
    x, width = normal(ROWS, cfg.d_model), cfg.d_model
    up, down = normal(cfg.n_experts, cfg.moe_ffn, width, std=width**-0.5), normal(cfg.n_experts, width, cfg.moe_ffn, std=cfg.moe_ffn**-0.5)
    yield Contest("experts", [x, ids, shares, up, down], functools.partial(experts, activation=cfg.activation), grouped_experts,
                  compiles=dtype == torch.bfloat16)  # the compiler knows no grouped product of fp32

    q, k, v = (normal(ROWS, heads, cfg.head_dim) for heads in (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads))
    yield Contest("attention", [q, k, v], lambda q, k, v: attention(q, k, v, ends, segments_T=documents)[0], sdpa_per_document)

    inner, states = cfg.mamba_heads * cfg.mamba_head_dim, cfg.mamba_groups * cfg.mamba_state
    convolved = [normal(ROWS, inner + 2 * states), normal(inner + 2 * states, cfg.mamba_conv, std=0.5), normal(inner + 2 * states)]
    yield Contest("conv", convolved, lambda x, weight, bias: causal_conv1d(x, weight, bias, documents), conv1d_per_document)

    rates = (-0.5 - torch.rand(cfg.mamba_heads)).requires_grad_()
    groups = [normal(ROWS, cfg.mamba_groups, cfg.mamba_state) for _ in "bc"]
    scanned = [normal(ROWS, cfg.mamba_heads, cfg.mamba_head_dim), normal(ROWS, cfg.mamba_heads), rates, *groups,
               torch.ones(cfg.mamba_heads).requires_grad_()]
    yield Contest("ssd", scanned, lambda x, dt, a, b, c, d: ssd(x, dt, a, b, c, d, documents, chunk=cfg.mamba_chunk), transformers_scan)

    labels = torch.randint(cfg.vocab_size, (ROWS,))
    labels[TOKENS - 1 :: TOKENS] = -100
    yield Contest("cross_entropy", [normal(ROWS, width), normal(cfg.vocab_size, width, std=width**-0.5), labels],
                  lambda h, weight, labels: linear_cross_entropy(h, weight, labels)[0],
                  lambda h, weight, labels: F.cross_entropy(F.linear(h, weight), labels, reduction="sum"))


def grouped_experts(x: Tensor, ids: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Gather, two grouped products, combine."""
    order = ids.flatten().argsort(stable=True)
    tokens = order // ids.shape[1]
    ends = (ids.flatten()[:, None] == torch.arange(len(up))).sum(0).cumsum(0, dtype=torch.int32)
    h = F.relu(F.grouped_mm(x[tokens], up.transpose(1, 2), offs=ends)).square()
    y = F.grouped_mm(h, down.transpose(1, 2), offs=ends) * shares.flatten()[order, None]
    return torch.zeros(x.shape).index_add(0, tokens, y.float()).to(x.dtype)


def sdpa_per_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call a document."""
    heads_first = [t[None].transpose(1, 2).split(TOKENS, 2) for t in (q, k, v)]
    out = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in zip(*heads_first, strict=True)]
    return torch.cat(out).transpose(1, 2).flatten(0, 1)


def conv1d_per_document(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One call a document, padded on the left."""
    out = [F.conv1d(F.pad(document.T, (weight.shape[1] - 1, 0))[None], weight[:, None], bias, groups=len(weight))[0].T
           for document in x.split(TOKENS)]
    return F.silu(torch.cat(out))


def transformers_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The PyTorch path of transformers' Mamba-2, one row of its batch a document."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    x_BTNH, dt_BTN, b_BTGS, c_BTGS = (t.unflatten(0, (DOCUMENTS, TOKENS)) for t in (x, dt, b, c))
    return mamba2_chunk_scan(x_BTNH, dt_BTN, a, b_BTGS, c_BTGS, CONFIG.mamba_chunk, D=d, dt_softplus=True).flatten(0, 1).to(x.dtype)


def _pass(function: Function, inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward: the result and all gradients."""
    leaves = [t for t in inputs if t.is_floating_point()]
    upstream: list[Tensor] = []

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = function(*inputs)
        if not upstream:
            upstream.append(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
        grads = torch.autograd.grad(out, leaves, upstream[0].to(out.dtype))
        return (out.detach(), *grads)

    return forward_and_backward


def _difference(contest: Contest) -> float:
    """Largest of the result and the gradients, relative."""
    ours, theirs = _pass(contest.ours, contest.inputs)(), _pass(contest.theirs, contest.inputs)()
    return max(error(a, b) for a, b in zip(ours, theirs, strict=True))


def _race(contest: Contest, rounds: int) -> tuple[dict[str, float], str]:
    """Median seconds of each, and which of theirs it was."""
    theirs = {"eager": _pass(contest.theirs, contest.inputs)}
    if contest.compiles:
        theirs["compiled"] = _pass(torch.compile(contest.theirs), contest.inputs)
    for call in theirs.values():
        call()
    winner = min(theirs, key=lambda name: min(seconds(theirs[name]) for _ in range(3)))
    calls = {"ours": _pass(torch.compile(contest.ours, fullgraph=True, dynamic=False), contest.inputs), "theirs": theirs[winner]}
    return alternate(calls, rounds, warm_up=1), winner


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that PyTorch's allocator held at once during a call, beyond what it held before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    changes = sorted((event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
