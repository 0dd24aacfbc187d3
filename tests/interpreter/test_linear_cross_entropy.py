"""Head and loss with the kernel that turns logits into gradients: blocks of 16 entries of the vocabulary, chunks of 20 rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.linear_cross_entropy import triton as module
from tests.kernels import test_linear_cross_entropy as common
from tests.kernels.test_linear_cross_entropy import OPTIONS, TOLERANCE, D, V, assert_close, definition, results

BLOCK, T = 16, 41
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_blocks():
    with launch.forced("_row_kernel", {"BLOCK_V": BLOCK, "num_warps": 1}):
        yield


def inputs(ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    h, weight, labels = common.inputs(ignore_index)
    return h[:T], weight, labels[:T]


def run(h: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32, chunk: int | None = 20,
        **options: Any) -> dict[str, Tensor]:
    return results(h, weight, labels, dtype, implementation="triton", chunk=chunk, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options, dtype):
    arguments = inputs(options.get("ignore_index", -100))
    got = run(*arguments, dtype, **options)
    assert_close(got, results(*arguments, torch.float64, implementation="reference", **options), TOLERANCE[dtype])
    assert got["loss"].dtype == torch.promote_types(dtype, torch.float32)
    assert got["h"].dtype == got["weight"].dtype == dtype


@pytest.mark.parametrize("options", OPTIONS)
def test_bf16_and_fp16_are_as_close_as_all_logits_at_once(options):
    arguments = inputs(options.get("ignore_index", -100))
    exact = results(*arguments, torch.float64, implementation="reference", **options)
    for dtype in (torch.bfloat16, torch.float16):
        plain, got = results(*arguments, dtype, implementation="reference", **options), run(*arguments, dtype, **options)
        for name in ("h", "weight"):
            ours, theirs = (float((x[name].double() - exact[name]).norm()) for x in (got, plain))
            assert ours <= 2 * theirs, (dtype, name)


@pytest.mark.parametrize("vocabulary", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_vocabularies_around_a_block(vocabulary):
    h, weight, labels = inputs()
    weight, labels = weight[:vocabulary], torch.where(labels == -100, -100, labels % vocabulary)[:9]
    options: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.1}
    expected = results(h[:9], weight, labels, torch.float64, function=definition, **options)
    assert_close(run(h[:9], weight, labels, torch.float64, **options), expected, 1e-13)


@pytest.mark.parametrize("chunk", [1, 7, T - 1, T, T + 1, None])
def test_any_chunk(chunk):
    h, weight, labels = inputs()
    rows = 9 if chunk == 1 else T
    arguments = h[:rows], weight, labels[:rows]
    assert_close(run(*arguments, torch.float64, chunk), results(*arguments, torch.float64, implementation="reference"), 1e-13)


def test_chunk_rule():
    """As many rows as the model is wide, a whole number of tiles, and never so few that the weight's traffic shows."""
    assert [module.chunk_rows(width) for width in (64, 1024, 1025, 2048, 2688)] == [1024, 1024, 1280, 2048, 2816]


@pytest.mark.parametrize("rows", [0, 1, 21])
def test_no_labels(rows):
    h, weight, labels = inputs()
    got = run(h[:rows], weight, torch.full_like(labels[:rows], -100), z_loss=0.1, label_smoothing=0.1, soft_cap=2.0)
    assert got["h"].shape == (rows, D)
    assert not any(value.any() for value in got.values())


def test_an_unlabelled_row_spoils_nothing():
    h, weight, labels = inputs()
    clean = run(h, weight, labels)
    h[labels == -100] = float("nan")
    got = run(h, weight, labels)
    assert torch.equal(got["loss"], clean["loss"])
    assert torch.equal(got["h"], clean["h"])


@pytest.mark.parametrize("scale", [4.0, 30.0, 3000.0])
def test_confident_predictions(scale):
    """What is left of the gradient of a right guess is as exact as any other number, and nothing overflows."""
    weight, h = torch.eye(V).double() * scale, torch.eye(V).double()[:5] * 2
    labels = torch.tensor([0, 1, 2, 4, 3])
    got, exact = run(h, weight, labels), results(h, weight, labels, torch.float64, implementation="reference")
    assert all(value.isfinite().all() for value in got.values())
    assert_close(got, exact, 1e-6)
    if scale == 4.0:
        right = exact["h"][0, 0]
        assert abs(float(got["h"][0, 0] - right)) <= 1e-3 * abs(float(right))
        assert_close(run(h, weight, labels, torch.bfloat16), exact, 8e-3)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_soft_cap_of_tiny_and_huge_logits(scale):
    """Where the cap is reached, its derivative is tiny but not zero; huge logits of fp32 are too coarse to tell how tiny."""
    h, weight, labels = inputs()
    h, labels = h[:20] * scale, labels[:20]
    expected = results(h, weight, labels, torch.float64, implementation="reference", soft_cap=3.0)
    assert_close(run(h, weight, labels, torch.float64, soft_cap=3.0), expected, 1e-9)
    got = run(h, weight, labels, soft_cap=3.0)
    torch.testing.assert_close(got["loss"].double(), expected["loss"])
    assert all(value.isfinite().all() for value in got.values())


def test_gradient_of_one_input_alone():
    h, weight, labels = inputs()
    both = run(h, weight, labels)
    for name in ("h", "weight"):
        leaves = {"h": h.float(), "weight": weight.float()}
        leaves[name].requires_grad_()
        loss, _ = linear_cross_entropy(leaves["h"], leaves["weight"], labels, chunk=20, implementation="triton")
        assert torch.equal(torch.autograd.grad(loss * 0.37, leaves[name])[0], both[name])
    with torch.no_grad():
        loss, count = linear_cross_entropy(leaves["h"], leaves["weight"], labels, chunk=20, implementation="triton")
    assert not loss.requires_grad
    assert torch.equal(loss, both["loss"])
    assert torch.equal(count, both["count"])


def test_repeated_backward_and_repeated_runs_are_equal():
    h, weight, labels = inputs()
    h, weight = h.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    first, second = (linear_cross_entropy(h, weight, labels, chunk=20, z_loss=0.1, implementation="triton")[0] for _ in range(2))
    grads = [torch.autograd.grad(loss * 0.5, (h, weight), retain_graph=True) for loss in (first, first, second)]
    assert torch.equal(first, second)
    for again in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], again, strict=True))


def test_inputs_with_strides():
    h, weight, labels = inputs()
    expected = run(h, weight, labels, torch.float64)
    h, weight = (torch.stack((t.T, -t.T))[0].T for t in (h, weight))
    strided = torch.stack((labels, labels), 1)[:, 0]
    loss, count = linear_cross_entropy(h.requires_grad_(), weight.requires_grad_(), strided, chunk=20, implementation="triton")
    dh, dweight = torch.autograd.grad(loss * 0.37, (h, weight))
    assert_close({"loss": loss.detach(), "count": count, "h": dh, "weight": dweight}, expected, 1e-13)


def test_rows_beyond_32_bit_offsets():
    """No element is read: the rows have no labels, but where they begin is computed."""
    labels, losses = torch.full((3,), -100), torch.ones(3)
    options = {"SMOOTHING": 0.0, "Z_LOSS": 0.0, "SOFT_CAP": 0.0, "GRADIENT": False, "BLOCK_V": BLOCK}
    module._row_kernel[(3,)](torch.ones(1), labels, losses, 2**30, -100, **options)
    assert not losses.any()


def test_labels_outside_the_vocabulary_are_an_error():
    h, weight, labels = inputs()
    labels[3] = V
    with pytest.raises(Exception, match="outside the vocabulary"):
        run(h, weight, labels)


def test_operator_passes_opcheck():
    h, weight, labels = inputs()
    for h_grad, weight_grad in ((True, True), (False, True), (False, False)):
        arguments = h[:5].float().requires_grad_(h_grad), weight.float().requires_grad_(weight_grad), labels[:5]
        torch.library.opcheck(module._loss_op, (*arguments, 3, -100, 0.1, 0.1, 2.0, h_grad, weight_grad))


def test_compiles_whole_and_once_for_any_number_of_rows():
    def step(h, weight, labels):
        loss, count = linear_cross_entropy(2 * h, weight, labels, chunk=20, z_loss=0.1, implementation="triton")
        return 3 * loss, count

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (40, 23):
        h, weight, labels = inputs()
        arguments = h[:rows], weight, labels[:rows]
        expected = results(*arguments, torch.float32, function=step)
        with torch.compiler.set_stance("default" if rows == 40 else "fail_on_recompile"):
            assert_close(results(*arguments, torch.float32, function=compiled), expected, 1e-6)
