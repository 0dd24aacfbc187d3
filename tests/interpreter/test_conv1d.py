"""The convolution's kernels: what tests/kernels/test_conv1d.py asks of the versions on a CPU, and what only kernels can get wrong."""

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.conv1d import causal_conv1d, centred_conv1d
from kernels.conv1d import triton as module
from tests.interpreter.memory import sparse
from tests.kernels.test_conv1d import C, assert_close, causal, centred, inputs, results, segments, separate

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ORDERS = [[1, 2, 3, 15, 16, 17, 30], [17, 0, 1, 40, 3, 2], [1], [2], [15], [16], [17], [1] * 9]


@pytest.fixture(autouse=True)
def small_tiles():
    """Tiles of 16 rows and 4 channels; the gradients' spans have two of them."""
    with launch.forced("_convolve", {"BLOCK_T": 16, "BLOCK_C": 4}), launch.forced("_gradients", {"TILES": 2, "BLOCK_T": 16, "BLOCK_C": 4}):
        yield


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
def test_causal_convolution_of_each_document_alone(lengths, activation, dtype):
    arguments = inputs(sum(lengths))
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(separate(lengths, activation, ahead=0), arguments, probe)
    got = results(causal(lengths, activation=activation, implementation="triton"), arguments, probe, dtype)
    assert_close(got, expected, TOLERANCE[dtype])
    assert all(value.dtype == dtype for value in got.values())


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("lengths", ORDERS[:3], ids=str)
def test_centred_convolution_of_each_document_alone(lengths, width):
    arguments = inputs(sum(lengths), width)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(separate(lengths, None, ahead=width // 2), arguments, probe)
    assert_close(results(centred(lengths, implementation="triton"), arguments, probe, torch.float32), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_other_widths_without_bias(width):
    lengths = [1, 2, 3, 40]
    x, weight, _ = inputs(46, width)
    probe = torch.randn_like(x)
    expected = results(separate(lengths, "silu", ahead=0), (x, weight, torch.zeros(C, dtype=torch.float64)), probe)
    del expected["bias"]
    assert_close(results(causal(lengths, implementation="triton"), (x, weight), probe, torch.float32), expected, 1e-6)


@pytest.mark.parametrize("convolution", [causal, centred])
def test_a_document_moves_no_bit_of_its_neighbours(convolution):
    x, weight, bias = inputs(57, 5)
    probe = torch.randn_like(x)
    function = convolution([7, 20, 30], implementation="triton")
    before = results(function, (x, weight, bias), probe, torch.float32)
    changed = torch.cat((x[:7], torch.randn(20, C), x[27:]))
    after = results(function, (changed, weight, bias), probe, torch.float32)
    for name in ("y", "x"):
        assert torch.equal(*(torch.cat((t[name][:7], t[name][27:])) for t in (before, after))), name
    assert not torch.equal(before["y"][7:27], after["y"][7:27])


def test_numbers_that_come_back_are_new_documents():
    x, weight, bias = (t.float() for t in inputs(20, 5))
    lengths = torch.tensor([6, 1, 5, 2, 6])
    unique, again = (torch.repeat_interleave(torch.tensor(ids), lengths) for ids in ([0, 1, 2, 3, 4], [2, 1, 2, 9, 2]))
    for function in (causal_conv1d, centred_conv1d):
        assert torch.equal(*(function(x, weight, bias, ids, implementation="triton") for ids in (unique, again)))


def test_inputs_and_gradients_with_strides():
    """A slice of a wider projection, transposed rows, and gradients with strides of 0 and of columns."""
    lengths = [30, 15]
    x, weight, bias = inputs(45)
    for probe in (torch.ones(1, 1, dtype=torch.float64).expand(45, C), torch.randn(C, 45, dtype=torch.float64).T):
        expected = results(separate(lengths, "silu", ahead=0), (x, weight, bias), probe)
        for wide in (torch.cat((x, x), 1)[:, :C], x.T.contiguous().T):
            leaves = [t.float().detach().requires_grad_() for t in (wide, weight.T.contiguous().T, torch.stack((bias, bias), 1)[:, 0])]
            y = causal(lengths, implementation="triton")(*leaves)
            got = (y.detach(), *torch.autograd.grad(y, leaves, probe.float()))
            assert_close(dict(zip(expected, got, strict=True)), expected, 1e-6)


def test_offsets_beyond_32_bits():
    tokens, stride = 40, 2**26
    x, weight, bias = (t.float() for t in inputs(tokens))
    far = [sparse(tokens, stride, C, torch.float32) for _ in range(2)]
    far[0].copy_(x)
    far[1].copy_(torch.randn_like(x))
    outputs: list[tuple[Tensor, ...]] = []
    for given, dy in (far, [t.clone() for t in far]):
        leaves = [t.detach().requires_grad_() for t in (given, weight, bias)]
        fx, fweight, fbias = leaves
        y = causal_conv1d(fx, fweight, fbias, segments([tokens]), implementation="triton")
        outputs.append((y, *torch.autograd.grad(y, leaves, dy)))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_repeated_runs_are_bit_equal():
    arguments, probe = inputs(75), torch.randn(75, C, dtype=torch.float64)
    runs = [results(causal([75], implementation="triton"), arguments, probe, torch.float32) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_operators_pass_opcheck():
    x, weight, bias = (t.float().requires_grad_() for t in inputs(20))
    documents = segments([5, 15])
    for dtype, given in ((torch.float32, bias), (torch.bfloat16, None)):
        torch.library.opcheck(module._forward, (x.to(dtype), weight, given, documents, True, 0))
    for activation in (True, False):
        with torch.no_grad():
            torch.library.opcheck(module._backward, (torch.randn(20, C), x, weight, bias, documents, activation, 0))


def test_compiles_whole():
    arguments, probe = inputs(45), torch.randn(45, C, dtype=torch.float64)
    function = causal([30, 15], implementation="triton")
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(results(compiled, arguments, probe, torch.float32), results(separate([30, 15], "silu", ahead=0), arguments, probe), 1e-6)
