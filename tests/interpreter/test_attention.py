"""Triton's attention against the reference, in tiles of 16 rows and keys."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.attention import attention
from kernels.attention import triton as module
from tests.interpreter.memory import sparse
from tests.kernels import test_attention as cases
from tests.kernels.test_attention import NAMES, OPTIONS, assert_close, boundaries, context_parallel, ring, separate

# Rows that see nothing divide by zero; what comes of it is dropped.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
BLOCK = 16
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def small_tiles(request):
    with tiles(*getattr(request, "param", (BLOCK, BLOCK))):
        yield


def tiles(block_m: int, block_n: int) -> ExitStack:
    stack = ExitStack()
    for kernel in ("_forward_kernel", "_query_kernel", "_key_kernel"):
        stack.enter_context(launch.forced(kernel, {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 1}))
    return stack


def results(rows: list[Tensor], probe: tuple[Tensor, Tensor], lengths: list[int], padding: int, dtype: torch.dtype = torch.float32,
            **options) -> dict[str, Tensor]:
    return cases.results(rows, probe, lengths, padding, dtype, implementation="triton", **options)


def draw(lengths: list[int], padding: int, heads: int = 4, groups: int = 2, size: int = 16,
         keys: int | None = None) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    count = sum(lengths) + padding
    return cases.inputs(count, heads, groups, keys, size), cases.probes(count, heads, size)


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    lengths, padding = [1, 15, 17, 0, 33], 5
    rows, probe = draw(lengths, padding, 1, 1)
    got = results(rows, probe, lengths, padding, **options)
    assert_close(got, separate(rows, probe, lengths, padding, **options), 1e-6)
    assert got["lse"].dtype == torch.float32


@pytest.mark.parametrize("small_tiles", [(16, 32), (32, 16)], indirect=True)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 9, "causal": False}], ids=str)
def test_tiles_that_are_no_squares(options):
    lengths, padding = [31, 38, 2], 30
    rows, probe = draw(lengths, padding, 1, 1)
    assert_close(results(rows, probe, lengths, padding, **options), separate(rows, probe, lengths, padding, **options), 1e-6)


@pytest.mark.parametrize("lengths, padding", [([0, 20, 0, 0, 16, 0], 0), ([0, 0], 7), ([16], 16), ([1], 0), ([3] * 6, 20)])
def test_documents_of_every_length(lengths, padding):
    rows, probe = draw(lengths, padding, 1, 1)
    assert_close(results(rows, probe, lengths, padding), separate(rows, probe, lengths, padding), 1e-6)


@pytest.mark.parametrize("heads, groups", [(3, 3), (4, 1), (6, 2), (5, 1)])
def test_heads_that_share_keys(heads, groups, monkeypatch):
    """Of four heads that share keys, two go to one program and two to another."""
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    lengths, padding = [18, 3], 1
    rows, probe = draw(lengths, padding, heads, groups)
    assert_close(results(rows, probe, lengths, padding), separate(rows, probe, lengths, padding), 1e-6)


@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 192, 256])
def test_sizes_of_heads(size):
    lengths, padding = [20, 3], 2
    rows, probe = draw(lengths, padding, 2, 1, size)
    assert_close(results(rows, probe, lengths, padding), separate(rows, probe, lengths, padding), 1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_ranges_of_keys(options):
    lengths, keys, padding = [3, 20, 16, 0, 9, 12], [(0, 3), (3, 60), (3, 65), (65, 65), (65, 70), (70, 70)], 4
    rows, probe = draw(lengths, padding, 1, 1, keys=75)
    got = results(rows, probe, lengths, padding, keys=keys, **options)
    assert_close(got, separate(rows, probe, lengths, padding, keys, **options), 1e-6)


@pytest.mark.parametrize("divided", [context_parallel, ring])
def test_context_parallel_is_the_undivided_call(divided):
    lengths, padding = [13, 40, 1, 6], 4
    (q, k, v), (probe, dlse) = draw(lengths, padding, 1, 1)
    expected = cases.results((q, k, v), (probe, dlse), lengths, padding, implementation="reference")
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    out, lse = divided(*leaves, lengths, "triton")
    real = torch.arange(len(q)) < sum(lengths)
    loss = (out * probe)[real].sum() + (lse * dlse)[:, real].sum()
    got = (torch.where(real[:, None, None], out, 0).detach(), torch.where(real, lse, 0).detach(), *torch.autograd.grad(loss, leaves))
    assert_close(dict(zip(NAMES, got, strict=True)), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_as_plain_pytorch(dtype):
    lengths, padding = [40, 1, 20], 3
    rows, probe = draw(lengths, padding, 2, 1)
    exact = separate(rows, probe, lengths, padding)
    got, plain = results(rows, probe, lengths, padding, dtype), separate(rows, probe, lengths, padding, dtype=dtype)
    assert [got[name].dtype for name in NAMES] == [dtype, torch.float32, dtype, dtype, dtype]
    for name in NAMES:
        ours, theirs = (float((x[name].double() - exact[name]).norm()) for x in (got, plain))
        assert ours <= 2 * theirs, name
        assert ours <= TOLERANCE[dtype] * float(exact[name].norm()), name


@pytest.mark.parametrize("changed", [slice(0, 20), slice(53, 70), slice(70, 76)], ids=["first", "last", "padding"])
def test_a_document_does_not_move_another_by_a_bit(changed):
    """Whatever it holds; only the gradients of keys in a tile that it shares are spared what is not finite."""
    lengths, padding = [20, 33, 17], 6
    rows, probe = draw(lengths, padding, 1, 1)
    first = results(rows, probe, lengths, padding)
    same = torch.ones(76, dtype=torch.bool)
    same[changed] = changed.start == 70
    for filling, names in ((1e3, NAMES), (torch.nan, NAMES if changed.start == 70 else ("out", "lse", "q"))):
        other = [t.clone() for t in rows]
        for t in other:
            t[changed] *= filling
        got = results(other, probe, lengths, padding)
        for name in names:
            where = (slice(None), same) if name == "lse" else same
            assert torch.equal(got[name][where], first[name][where]), name


def test_large_scores():
    cases.test_large_scores("triton")


def test_documents_of_one_row_with_scores_far_below_zero():
    lengths, padding = [1, 1, 1], 1
    (q, _, v), probe = draw(lengths, padding, 2, 2)
    rows = [q * 10, -q * 10, v]
    got = results(rows, probe, lengths, padding)
    assert_close(got, separate(rows, probe, lengths, padding), 1e-6)
    assert float(got["lse"][:, :3].max()) < -100


def test_inputs_and_gradients_with_strides():
    """One tensor of q, k and v side by side, heads first; gradients that are one number everywhere, and transposed."""
    lengths, padding = [20, 3], 0
    rows, probe = draw(lengths, padding, 2, 1)
    cu_seqlens, segments = boundaries(lengths, padding)
    bounds = torch.stack((cu_seqlens, cu_seqlens), 1)[:, 0].long()
    joint = torch.cat(rows, 1).float().requires_grad_()
    side_by_side = joint.split((2, 1, 1), 1)
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in side_by_side]
    columns_first = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in side_by_side]
    for probe_out, reduce in ((probe[0], lambda out: (out.mT * probe[0].mT).sum()), (torch.ones_like(probe[0]), torch.sum)):
        expected = cases.results(rows, (probe_out, probe[1]), lengths, padding, implementation="reference")
        for q, k, v in (side_by_side, heads_first, columns_first):
            out, lse = attention(q, k, v, bounds, segments_T=segments, implementation="triton")
            grad = torch.autograd.grad(reduce(out) + (lse * probe[1]).sum(), joint, retain_graph=True)[0]
            got = dict(zip(NAMES, (out.detach(), lse.detach(), *grad.split((2, 1, 1), 1)), strict=True))
            assert_close(got, expected, 1e-6)


def test_gradient_of_one_output_alone():
    lengths, padding = [33, 4], 2
    rows, probe = draw(lengths, padding, 2, 1)
    cu_seqlens, segments = boundaries(lengths, padding)
    for alone in ((probe[0], probe[1] * 0), (probe[0] * 0, probe[1])):
        expected = cases.results(rows, alone, lengths, padding, implementation="reference")
        q, k, v = (t.float().requires_grad_() for t in rows)
        out, lse = attention(q, k, v, cu_seqlens, segments_T=segments, implementation="triton")
        loss = (out * alone[0]).sum() if alone[0].any() else (lse * alone[1])[:, :37].sum()
        for name, value in zip(("q", "k", "v"), torch.autograd.grad(loss, (q, k, v)), strict=True):
            assert float((value - expected[name]).norm()) <= 1e-6 * float(expected[name].norm()), name


def far_rows(rows: int, heads: int, size: int) -> Tensor:
    return sparse(rows, 1 << 20, heads * size, torch.float16).view(rows, heads, size)


def far_heads(rows: int, heads: int, size: int) -> Tensor:
    return sparse(heads, 1 << 30, rows * size, torch.float16).view(heads, rows, size).transpose(0, 1)


class Far(torch.autograd.Function):
    """A copy elsewhere."""

    @staticmethod
    def forward(ctx, t, place):
        return place(*t.shape).copy_(t)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("small_tiles", [(32, 32)], indirect=True)
@pytest.mark.parametrize("count, heads, place", [(2080, 1, far_rows), (40, 3, far_heads)])
def test_offsets_beyond_32_bits(count, heads, place):
    """The last rows, or the last head, lie more than 2³¹ numbers behind the first."""
    lengths, keys = [count - 32, 20], [(0, 0), (count - 30, count - 2)]
    rows, probe = draw(lengths, 12, heads, heads)
    expected = cases.results(rows, probe, lengths, 12, torch.float16, keys=keys, implementation="reference")

    def far(q, k, v, *arguments, **options):
        out, lse = attention(*[Far.apply(t, place) for t in (q, k, v)], *arguments, **options)
        out.register_hook(lambda grad: place(*grad.shape).copy_(grad))
        return out, lse

    got = results(rows, probe, lengths, 12, torch.float16, function=far, keys=keys)
    assert_close(got, expected, 2e-3)


def test_every_run_gives_the_same_bits():
    lengths, padding = [20, 3], 3
    rows, probe = draw(lengths, padding, 2, 1)
    first, second = (results(rows, probe, lengths, padding, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_gradients_of_some_of_the_keys_add_up():
    lengths, padding = [1, 15, 0, 38], 2
    rows, (dout, dlse) = draw(lengths, padding, 2, 1)
    expected = separate(rows, (dout, torch.zeros_like(dlse)), lengths, padding, causal=False)
    for name, got in zip("qkv", cases.gradients_of_halves(rows, dout, lengths, padding, torch.float32, "triton"), strict=True):
        assert float((got.double() - expected[name]).norm()) <= 1e-6 * float(expected[name].norm()), name


def test_operators_keep_the_compilers_contract():
    lengths, padding = [5, 0, 12], 2
    (q, k, v), _ = draw(lengths, padding, 2, 1)
    q, k, v = (t.float().requires_grad_() for t in (q, k, v))
    bounds, _ = boundaries(lengths, padding)
    ranges = (bounds[:-1], bounds[1:]) * 2
    bias = torch.randn(2, 19, 37, requires_grad=True)
    torch.library.opcheck(module.forward_op, (q, k, v, None, *ranges, True, 0.3, None))
    torch.library.opcheck(module.forward_op, (q, k, v, bias, *ranges, False, 0.3, 4))
    out, lse = module.forward_op(q, k, v, bias, *ranges, False, 0.3, 4)
    inputs = [t.detach() for t in (out, lse, q, k, v, bias)]
    torch.library.opcheck(module.backward_op, (*inputs, *ranges, out.detach(), lse.detach(), False, 0.3, 4))


def test_compiles_whole_and_once_for_any_boundaries():
    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    rows, probe = draw([37], 0, 2, 1)
    for lengths, padding, stance in (([20, 11, 0], 6, "default"), ([1, 0, 30], 6, "fail_on_recompile")):
        with torch.compiler.set_stance(stance):
            got = results(rows, probe, lengths, padding, function=compiled)
        assert_close(got, separate(rows, probe, lengths, padding), 1e-6)


def test_what_it_cannot_do_is_refused():
    q = torch.zeros(3, 1, 16)
    bounds, segments = boundaries([3], 0)
    with pytest.raises(ValueError, match="float64"):
        attention(q.double(), q.double(), q.double(), bounds, segments_T=segments, implementation="triton")
    with pytest.raises(ValueError, match="scale 0"):
        attention(q, q, q, bounds, segments_T=segments, scale=0.0, implementation="triton")
