"""Packed attention: the reference against separate calls of PyTorch's attention, fast versions against the reference."""

import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import BACKWARD, adapters, attention, attention_backward, cpu

N, G, H = 4, 2, 8
LENGTHS = [1, 2, 3, 63, 64, 65, 100]
FAST = ["blocks"]  # the others need CUDA, or Triton's interpreter
EVERYWHERE = ["reference", *FAST]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
Ranges = list[tuple[int, int]]
NAMES = ("out", "lse", "q", "k", "v")
OPTIONS = [
    pytest.param({}, id="causal"),
    pytest.param({"causal": False}, id="both directions"),
    pytest.param({"window": 1}, id="itself"),
    pytest.param({"window": 10, "scale": 0.7}, id="window of 10"),
    pytest.param({"window": 64, "causal": False}, id="window of 64, both directions"),
    pytest.param({"window": 1000, "scale": -0.2}, id="window beyond the documents"),
]


def boundaries(lengths: list[int], padding: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens and segments."""
    counts = torch.tensor([*lengths, padding])
    cu_seqlens = torch.cat((counts.new_zeros(1), counts[:-1].cumsum(0)))
    return cu_seqlens.int(), torch.arange(len(counts)).repeat_interleave(counts).int()


def inputs(rows: int, heads: int = N, groups: int = G, keys: int | None = None, size: int = H) -> list[Tensor]:
    """q, k, v in fp64, of values that bf16 holds exactly."""
    return [torch.randn(length, n, size).bfloat16().double() for length, n in ((rows, heads), *[(keys or rows, groups)] * 2)]


def probes(rows: int, heads: int = N, size: int = H) -> tuple[Tensor, Tensor]:
    """What the gradients of out and lse are."""
    return torch.randn(rows, heads, size).bfloat16().double(), torch.randn(heads, rows).bfloat16().double()


def results(rows: Sequence[Tensor], probe: tuple[Tensor, Tensor], lengths: list[int], padding: int, dtype: torch.dtype = torch.float64,
            function=attention, keys: Ranges | None = None, **options) -> dict[str, Tensor]:
    """Outputs and gradients; the logarithm of rows that see nothing is set to 0, that of padding is checked before."""
    cu_seqlens, segments = boundaries(lengths, padding)
    q, k, v = (t.to(dtype).detach().clone().requires_grad_() for t in rows)
    ranges = {} if keys is None else {"keys_2U": torch.tensor(keys).T.int()}
    out, lse = function(q, k, v, cu_seqlens, segments_T=segments, **ranges, **options)
    assert bool((lse[:, segments >= len(lengths)] == -torch.inf).all())
    sighted = lse != -torch.inf
    loss = (out * probe[0].to(out.dtype)).sum() + (lse * probe[1].to(lse.dtype))[sighted].sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    return dict(zip(NAMES, (out.detach(), torch.where(sighted, lse.detach(), 0), *grads), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        value, reference = got[name].double(), expected[name].double()
        assert value.shape == reference.shape, name
        assert float((value - reference).norm()) <= tolerance * float(reference.norm()), name


def one_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, segments_T: Tensor, causal: bool = True,
                 scale: float | None = None, window: int | None = None) -> tuple[Tensor, Tensor]:
    """PyTorch's attention on rows and keys of a single document; rows that see nothing give what `attention` says."""
    i, j = torch.meshgrid(torch.arange(len(k) - len(q), len(k)), torch.arange(len(k)), indexing="ij")
    sees = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        sees &= j <= i
    if window is not None:
        sees &= (i - j < window) & (j - i < window)
    blind = int((~sees.any(-1)).sum())  # the first rows
    q, k, v = q.transpose(0, 1), *(t.repeat_interleave(q.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q[:, blind:], k, v, attn_mask=sees[blind:], scale=scale)
    scores = q[:, blind:] @ k.mT * (q.shape[-1]**-0.5 if scale is None else scale)
    lse = torch.logsumexp(scores.masked_fill(~sees[blind:], -torch.inf), -1)
    return F.pad(out.transpose(0, 1), (0, 0, 0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-torch.inf)


def separate(rows: Sequence[Tensor], probe: tuple[Tensor, Tensor], lengths: list[int], padding: int, keys: Ranges | None = None,
             **options) -> dict[str, Tensor]:
    """Every document by itself; zeros for padding."""
    q, k, v = rows
    expected = {name: torch.zeros_like(t) for name, t in zip(NAMES, (*probe, *rows), strict=True)}
    start = 0
    for u, length in enumerate(lengths):
        own = slice(start, start + length)
        seen = own if keys is None else slice(*keys[u])
        if length and seen.start < seen.stop:
            part = results((q[own], k[seen], v[seen]), (probe[0][own], probe[1][:, own]), [length], 0, function=one_document, **options)
            expected["out"][own], expected["lse"][:, own], expected["q"][own] = part["out"], part["lse"], part["q"]
            expected["k"][seen] += part["k"]
            expected["v"][seen] += part["v"]
        start += length
    return expected


def gradients_of_halves(rows: Sequence[Tensor], dout: Tensor, lengths: list[int], padding: int, dtype: torch.dtype,
                        implementation: str) -> list[Tensor]:
    """Of q, k and v, where every key of a document is seen, from one half of all keys after the other."""
    cu_seqlens, segments = boundaries(lengths, padding)
    q, k, v = (t.to(dtype) for t in rows)
    out, lse = attention(q, k, v, cu_seqlens, segments_T=segments, causal=False, implementation=implementation)
    found = []
    for half in (slice(0, len(k) // 2), slice(len(k) // 2, len(k))):
        seen = torch.stack((cu_seqlens[:-1], cu_seqlens[1:])).clamp(half.start, half.stop) - half.start
        found.append(attention_backward(dout.to(dtype), q, k[half], v[half], out, lse, cu_seqlens, segments_T=segments, keys_2U=seen,
                                        causal=False, implementation=implementation))
    dq, dk, dv = zip(*found, strict=True)
    return [dq[0] + dq[1], torch.cat(dk), torch.cat(dv)]


ORDERS = [LENGTHS, LENGTHS[::-1], [64, 1, 100, 2, 65, 3, 63], [0, 140, 0, 0, 1, 0], [300]]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
def test_reference_is_separate_calls(lengths, options):
    padding = 5 if lengths != LENGTHS[::-1] else 0
    rows, probe = inputs(sum(lengths) + padding), probes(sum(lengths) + padding)
    expected = separate(rows, probe, lengths, padding, **options)
    assert_close(results(rows, probe, lengths, padding, implementation="reference", **options), expected, 1e-13)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("implementation", sorted(set(BACKWARD) - {"triton"}))
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 140, 0, 1]], ids=str)
def test_gradients_of_some_of_the_keys_add_up(lengths, implementation, dtype):
    rows, (dout, dlse) = inputs(sum(lengths) + 5), probes(sum(lengths) + 5)
    expected = separate(rows, (dout, torch.zeros_like(dlse)), lengths, 5, causal=False)
    for name, got in zip("qkv", gradients_of_halves(rows, dout, lengths, 5, dtype, implementation), strict=True):
        assert got.dtype == dtype
        assert float((got.double() - expected[name]).norm()) <= TOLERANCE[dtype] * float(expected[name].norm()), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
def test_fast_versions_match_the_reference(lengths, options, implementation, dtype):
    padding = 5 if lengths != LENGTHS[::-1] else 0
    rows, probe = inputs(sum(lengths) + padding), probes(sum(lengths) + padding)
    expected = results(rows, probe, lengths, padding, implementation="reference", **options)
    got = results(rows, probe, lengths, padding, dtype, implementation=implementation, **options)
    assert_close(got, expected, TOLERANCE[dtype])
    assert [got[name].dtype for name in ("out", "q", "k", "v")] == [dtype] * 4
    assert got["lse"].dtype == torch.promote_types(dtype, torch.float32)


RANGES: list[tuple[list[int], Ranges]] = [
    ([3, 70, 5], [(0, 3), (3, 200), (200, 216)]),  # keys before the first row, as in a chunk of a document
    ([30, 0, 140, 20], [(0, 11), (11, 11), (11, 20), (20, 20)]),  # fewer keys than rows, none at all
    ([64, 40, 1, 33], [(10, 74), (10, 138), (10, 215), (215, 216)]),  # chunks of the same document
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths, keys", RANGES)
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_ranges_of_keys(implementation, lengths, keys, options):
    padding = 4
    rows, probe = inputs(sum(lengths) + padding, keys=220), probes(sum(lengths) + padding)
    got = results(rows, probe, lengths, padding, keys=keys, implementation=implementation, **options)
    assert_close(got, separate(rows, probe, lengths, padding, keys, **options), 1e-13)


def context_parallel(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], implementation: str) -> tuple[Tensor, Tensor]:
    """Two ranks, of which one has the first and the last quarter of the row and the other the two between, with all keys."""
    quarter, starts = len(q) // 4, [0, *itertools.accumulate(lengths)]
    outs, lses = {}, {}
    for mine in ((0, 3), (1, 2)):
        parts, keys = [], []
        for chunk, (start, end) in itertools.product(mine, itertools.pairwise(starts)):
            first, last = max(start, chunk * quarter), min(end, (chunk + 1) * quarter)
            if first < last:
                parts.append(last - first)
                keys.append((start, last))
        own = torch.cat([torch.arange(chunk * quarter, (chunk + 1) * quarter) for chunk in mine])
        cu_seqlens, segments = boundaries(parts, len(own) - sum(parts))
        out, lse = attention(q[own], k, v, cu_seqlens, segments_T=segments, keys_2U=torch.tensor(keys).T.int(),
                             implementation=implementation)
        for chunk, rows, logs in zip(mine, out.chunk(2), lse.chunk(2, 1), strict=True):
            outs[chunk], lses[chunk] = rows, logs
    return torch.cat([outs[chunk] for chunk in range(4)]), torch.cat([lses[chunk] for chunk in range(4)], 1)


def ring(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], implementation: str) -> tuple[Tensor, Tensor]:
    """Keys come in two halves; the results of both are merged by their logarithms."""
    half, starts = len(k) // 2, [0, *itertools.accumulate(lengths)]
    outs, lses = [], []
    for low, high in ((0, half), (half, len(k))):
        parts, keys = [], []
        for start, end in itertools.pairwise(starts):
            seen = (min(max(start, low), high), max(min(end, high), low))
            cut = min(max(start, high), end)  # rows from here on see all keys of this half
            parts += [cut - start, end - cut]
            keys += [seen, seen]
        cu_seqlens, segments = boundaries(parts, len(q) - sum(parts))
        ranges = torch.tensor(keys).T.int()
        causal = attention(q, k, v, cu_seqlens, segments_T=segments, keys_2U=ranges, implementation=implementation)
        whole = attention(q, k, v, cu_seqlens, segments_T=segments, keys_2U=ranges, causal=False, implementation=implementation)
        beyond = (segments % 2 == 1) & (segments < len(parts))
        outs.append(torch.where(beyond[:, None, None], whole[0], causal[0]))
        lses.append(torch.where(beyond, whole[1], causal[1]))
    lse = torch.logaddexp(*[lse.masked_fill(lse == -torch.inf, -1e4) for lse in lses])
    shares = [torch.exp(part - lse).T[..., None] for part in lses]
    return outs[0] * shares[0] + outs[1] * shares[1], lse


@pytest.mark.parametrize("divided", [context_parallel, ring])
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_context_parallel_is_the_undivided_call(implementation, divided):
    lengths, padding = [30, 100, 1, 17], 12
    (q, k, v), (probe, dlse) = inputs(160), probes(160)
    expected = results((q, k, v), (probe, dlse), lengths, padding, implementation=implementation)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = divided(*leaves, lengths, implementation)
    real = torch.arange(160) < sum(lengths)
    loss = (out * probe)[real].sum() + (lse * dlse)[:, real].sum()
    got = (torch.where(real[:, None, None], out, 0).detach(), torch.where(real, lse, 0).detach(), *torch.autograd.grad(loss, leaves))
    assert_close(dict(zip(NAMES, got, strict=True)), expected, 1e-12)


@pytest.mark.parametrize("implementation", FAST)
def test_gradients_of_keys_are_added_up_in_fp32(implementation):
    """300 documents of one row add 1/2 each to the gradients of the same two keys: sums in bf16 would stop at 128."""
    q, k, v = torch.ones(300, 1, 1), torch.zeros(2, 1, 1), torch.tensor([1.0, -1.0]).view(2, 1, 1)
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    out, _ = attention(q, k, v, torch.arange(301).int(), segments_T=torch.arange(300).int(), scale=1.0, implementation=implementation,
                       keys_2U=torch.tensor([[0], [2]]).expand(2, 300).int())
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    assert dk.flatten().tolist() == [150.0, -150.0]
    assert dv.flatten().tolist() == [150.0, 150.0]


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("heads, groups", [(1, 1), (6, 6), (6, 3), (5, 1)])
def test_heads_that_share_keys(heads, groups, implementation):
    lengths, padding = [40, 31], 3
    rows, probe = inputs(74, heads, groups), probes(74, heads)
    got = results(rows, probe, lengths, padding, implementation=implementation)
    assert_close(got, separate(rows, probe, lengths, padding), 1e-13)


@pytest.mark.parametrize("implementation", FAST)
def test_every_order_of_documents(implementation):
    def run(documents: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
        cu_seqlens, segments = boundaries([len(q) for q, _, _ in documents], 0)
        q, k, v = (torch.cat([document[i] for document in documents]) for i in range(3))
        return attention(q, k, v, cu_seqlens, segments_T=segments, implementation=implementation)

    documents = [inputs(n) for n in (3, 20, 66)]
    alone = [run([document]) for document in documents]
    for order in itertools.permutations(range(3)):
        out, lse = run([documents[u] for u in order])
        torch.testing.assert_close(out, torch.cat([alone[u][0] for u in order]), rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, torch.cat([alone[u][1] for u in order], 1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_document_does_not_move_another_by_a_bit(dtype, implementation):
    """Whatever it holds: numbers that are not finite stay where they are, those of padding too."""
    lengths, padding = [30, 150, 40], 6
    rows, probe = inputs(226), probes(226)
    first = results(rows, probe, lengths, padding, dtype, implementation=implementation)
    for changed in (slice(0, 30), slice(180, 220), slice(220, 226)):
        other = [t.clone() for t in rows]
        for t in other:
            t[changed] = float("nan")
        got = results(other, probe, lengths, padding, dtype, implementation=implementation)
        for name in NAMES:
            where = (slice(None), slice(30, 180)) if name == "lse" else slice(30, 180)
            assert torch.equal(got[name][where], first[name][where]), name
        if changed.start == 220:
            assert all(torch.equal(got[name], first[name]) for name in NAMES)


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_padding_gets_zeros(implementation):
    lengths, padding = [7, 140], 9
    rows, probe = inputs(156), probes(156)
    got = results(rows, probe, lengths, padding, torch.float32, implementation=implementation)
    assert not any(got[name][147:].any() for name in NAMES if name != "lse")
    assert all(bool(got[name][:147].abs().sum((1, 2)).gt(0).all()) for name in ("out", "v"))
    nothing = results(inputs(5), probes(5), [0, 0], 5, torch.float32, implementation=implementation)
    assert not any(t.any() for t in nothing.values())


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_large_scores(implementation):
    """The softmax of scores of ± 10,000 is a choice, and its logarithm the chosen score."""
    n = 140
    q, k, v = inputs(n, 2, 1)
    q, k = q.sign() * 100, k.sign() * 100
    cu_seqlens, segments = boundaries([n], 0)
    q, k, v = (t.float().requires_grad_() for t in (q, k, v))
    out, lse = attention(q, k, v, cu_seqlens, segments_T=segments, scale=1.0, implementation=implementation)
    scores = torch.einsum("inh,jgh->nij", q, k).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    best = scores == scores.amax(-1, keepdim=True)
    torch.testing.assert_close(lse, scores.amax(-1) + best.sum(-1).log())
    torch.testing.assert_close(out, torch.einsum("nij,jgh->inh", best / best.sum(-1, keepdim=True), v), rtol=1e-4, atol=1e-5)
    assert all(bool(t.isfinite().all()) for t in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))


@pytest.mark.parametrize("implementation", FAST)
def test_gradient_of_one_output_alone(implementation):
    lengths, padding = [33, 140], 2
    rows, probe = inputs(175), probes(175)
    for alone in ((probe[0], probe[1] * 0), (probe[0] * 0, probe[1])):
        expected = results(rows, alone, lengths, padding, implementation="reference")
        q, k, v = (t.clone().requires_grad_() for t in rows)
        cu_seqlens, segments = boundaries(lengths, padding)
        out, lse = attention(q, k, v, cu_seqlens, segments_T=segments, implementation=implementation)
        loss = (out * alone[0]).sum() if alone[0].any() else (lse * alone[1])[:, :173].sum()
        grads = torch.autograd.grad(loss, (q, k, v), materialize_grads=True)
        for name, value in zip(("q", "k", "v"), grads, strict=True):
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", FAST)
def test_inputs_with_strides(implementation):
    """Heads first, or one tensor of q, k and v side by side."""
    lengths, padding = [20, 135], 0
    rows, probe = inputs(155), probes(155)
    expected = results(rows, probe, lengths, padding, implementation="reference")
    cu_seqlens, segments = boundaries(lengths, padding)
    joint = torch.cat(rows, 1).requires_grad_()
    side_by_side = joint.split((N, G, G), 1)
    for q, k, v in (side_by_side, [t.transpose(0, 1).contiguous().transpose(0, 1) for t in side_by_side]):
        out, lse = attention(q, k, v, cu_seqlens, segments_T=segments, implementation=implementation)
        loss = (out.transpose(0, 1) * probe[0].transpose(0, 1)).sum() + (lse * probe[1]).sum()
        grad = torch.autograd.grad(loss, joint, retain_graph=True)[0]
        got = dict(zip(NAMES, (out.detach(), lse.detach(), *grad.split((N, G, G), 1)), strict=True))
        assert_close(got, expected, 1e-13)


def documents(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float,
              sides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """What other libraries compute, in memory full of NaN."""
    assert bounds.dtype == torch.int32
    assert longest == len(q)
    left, right = sides
    assert right in (0, left)
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)
    for start, end in itertools.pairwise(bounds.tolist()):
        own = slice(start, end)
        part = one_document(q[own], k[own], v[own], bounds, segments_T=bounds, causal=right == 0 and left != 0, scale=scale,
                            window=None if left == -1 else left + 1)
        out = torch.cat((out[:start], part[0], out[end:]))
        lse = torch.cat((lse[:, :start], part[1], lse[:, end:]), 1)
    return out, lse


def varlen_attn(q, k, v, bounds, key_bounds, longest, longest_keys, *, return_aux, scale, window_size, enable_gqa):
    assert return_aux.lse
    assert enable_gqa
    assert bounds is key_bounds
    assert longest == longest_keys
    return documents(q, k, v, bounds, longest, scale, window_size)


def flash_attn_varlen_func(q, k, v, bounds, key_bounds, longest, longest_keys, *, softmax_scale, causal, window_size, deterministic,
                           return_attn_probs):
    assert deterministic
    assert return_attn_probs
    assert bounds is key_bounds
    assert longest == longest_keys
    assert not causal or window_size[1] == 0
    return *documents(q, k, v, bounds, longest, softmax_scale, window_size), None


class DotProductAttention:
    def __init__(self, heads, size, *, num_gqa_groups, attention_dropout, qkv_format, softmax_scale, attn_mask_type, window_size):
        assert (heads, size, num_gqa_groups, attention_dropout, qkv_format) == (N, H, G, 0.0, "thd")
        assert attn_mask_type == ("padding" if window_size[1] else "padding_causal") or window_size == (0, 0)
        self.options = softmax_scale, window_size

    def __call__(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        assert cu_seqlens_q is cu_seqlens_kv
        assert max_seqlen_q == max_seqlen_kv
        return documents(q, k, v, cu_seqlens_q, max_seqlen_q, *self.options)[0].flatten(1)


@pytest.mark.parametrize("implementation", ["varlen", "flash", "transformer_engine"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padding", [0, 5])
def test_arguments_of_other_libraries(monkeypatch, padding, options, implementation):
    """Functions that do what the libraries' documentation says take their places."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(DotProductAttention=DotProductAttention))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(adapters, "known_bad_transformer_engine", lambda capability, cudnn, size: "")
    lengths = [1, 30, 0, 44]
    rows, probe = inputs(75 + padding), probes(75 + padding)
    probe[1].zero_()
    expected = results(rows, probe, lengths, padding, implementation="reference", **options)
    got = results(rows, probe, lengths, padding, implementation=implementation, **options)
    if implementation == "transformer_engine":
        assert bool(got["lse"][:, :75].isnan().all())
        got["lse"] = expected["lse"]
    assert_close(got, expected, 1e-13)
    with pytest.raises(NotImplementedError, match="keys_2U"):
        results(rows, probe, lengths, padding, implementation=implementation, keys=[(0, 1)] * 4)


@pytest.mark.parametrize("capability, cudnn, size, reason", [
    ((9, 0), 91_900, 128, ""), ((10, 0), 92_501, 64, ""), ((8, 0), 91_800, 256, ""), ((12, 0), 92_500, 128, "sm_120"),
    ((9, 0), 91_705, 128, "cuDNN 9.17"), ((9, 0), 92_601, 128, "cuDNN 9.26"), ((9, 0), 91_900, 80, "heads of 80")])
def test_known_bad_combinations_are_refused(monkeypatch, capability, cudnn, size, reason):
    assert reason in adapters.known_bad_transformer_engine(capability, cudnn, size)
    assert bool(adapters.known_bad_transformer_engine(capability, cudnn, size)) == bool(reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    q, (cu_seqlens, segments) = torch.zeros(2, 1, size), boundaries([2], 0)
    with pytest.raises(NotImplementedError if reason else ImportError, match=reason or "transformer_engine"):
        attention(q, q, q, cu_seqlens, segments_T=segments, implementation="transformer_engine")


def test_operator_passes_opcheck():
    cu_seqlens, _ = boundaries([3, 0, 30], 4)
    q, k, v = (t.float().requires_grad_() for t in inputs(37))
    torch.library.opcheck(cpu.forward_op, (q, k, v, cu_seqlens, None, True, 0.3, None))
    keys = torch.tensor([[0, 3, 3], [2, 3, 37]])
    torch.library.opcheck(cpu.forward_op, (q.detach(), k.detach(), v.detach(), cu_seqlens, keys, False, 0.3, 5))


@pytest.mark.parametrize("implementation", FAST)
def test_compiles_whole_and_once_for_any_boundaries(implementation):
    def step(q, k, v, cu_seqlens, segments_T):
        out, lse = attention(2 * q, k, v, cu_seqlens, segments_T=segments_T, implementation=implementation)
        return out * 3, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    rows, probe = inputs(60), probes(60)
    for lengths, padding in (([20, 31, 0], 9), ([1, 0, 58], 1)):
        expected = results(rows, probe, lengths, padding, torch.float32, function=step)
        with torch.compiler.set_stance("default" if padding == 9 else "fail_on_recompile"):
            assert_close(results(rows, probe, lengths, padding, torch.float32, function=compiled), expected, 1e-6)


def test_one_thread_gives_the_same_bits():
    """Documents that share keys add to their gradients one after the other, though threads begin with the longest."""
    lengths, keys = [20, 30, 40, 50, 60, 70, 80, 90], [*[(0, 100)] * 4, *[(100, 190)] * 4]
    rows, probe = inputs(sum(lengths), keys=190), probes(sum(lengths))
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(rows, probe, lengths, 0, torch.float32, keys=keys, implementation="blocks"))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in NAMES)


@pytest.mark.parametrize("bounds, keys, message", [
    ([0, 5, 9], None, "document 1 has rows 5 to 9 and keys 5 to 9, of 8 and 8"), ([0, 5, 3], None, "document 1 has rows 5 to 3"),
    ([0, 8], [[0], [9]], "document 0 has rows 0 to 8 and keys 0 to 9, of 8 and 8"), ([0, 8], [[-1], [8]], "keys -1 to 8"),
    ([0, 8], [[5], [2]], "keys 5 to 2"), ([0, 4, 8], [[0], [8]], r"^keys \[2, 1\] are not a range for each of 2 documents"),
    ([0, 2, 4, 8], [[2, 4, 0], [4, 8, 8]], "^document 2 starts or ends before the keys of the one before it"),
    ([0, 4, 8], [[2, 2], [8, 4]], "^document 1 starts or ends before the keys of the one before it")])
def test_rows_and_keys_that_are_not_there_or_out_of_order_are_refused(bounds, keys, message):
    """Not read beyond their end, nor added up by two threads at a time."""
    q, k, v = inputs(8)
    keys_2U = None if keys is None else torch.tensor(keys)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, torch.tensor(bounds), segments_T=torch.zeros(8, dtype=torch.int32), keys_2U=keys_2U, implementation="blocks")
    with pytest.raises(ValueError, match=r"^q \[8, 4, 8\], k \[8, 3, 8\] and v \[8, 3, 8\] do not fit one another"):
        attention(q, k[:, :1].expand(-1, 3, -1), v[:, :1].expand(-1, 3, -1), torch.tensor([0, 8]), segments_T=torch.zeros(8),
                  implementation="blocks")


def test_sizes_that_do_not_fit_are_refused():
    q, k, v = inputs(8)
    bounds, segments = torch.tensor([0, 8]), torch.zeros(8, dtype=torch.int32)
    for window in (0, -3):
        with pytest.raises(ValueError, match=f"^a window of {window} holds no key"):
            attention(q, k, v, bounds, segments_T=segments, window=window, causal=False, implementation="blocks")
    out, lse = attention(q, k, v, bounds, segments_T=segments, implementation="blocks")
    for dout, logs in ((out[:7], lse), (out, lse[:, :7]), (out, lse[:3])):
        with pytest.raises(ValueError, match=r"^q \[8, 4, 8\] gave no result \["):
            attention_backward(dout, q, k, v, dout, logs, bounds, segments_T=segments, implementation="blocks")
