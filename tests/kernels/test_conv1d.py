"""Depthwise convolutions against their definition, one document at a time: outputs, every gradient, any boundaries, no leaks."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.conv1d import causal_conv1d, centred_conv1d
from kernels.conv1d.reference import conv1d_reference

C = 6
NAMES = ("y", "x", "weight", "bias")
FAST = ["shifted"]
ALL = ["reference", *FAST]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LENGTHS = [1, 2, 3, 63, 64, 65, 100]
ORDERS = [LENGTHS, LENGTHS[::-1], [64, 1, 100, 0, 3, 65, 2, 0, 63], [1], [3], [32], [1] * 9]
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int, width: int = 4) -> Inputs:
    """x, weight, bias in fp64, of values that bf16 holds exactly."""
    x, weight, bias = (torch.randn(*shape).bfloat16().double() for shape in ((tokens, C), (C, width), (C,)))
    return x, weight, bias


def segments(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)).int()


def separate(lengths: list[int], activation: str | None, ahead: int) -> Callable[..., Tensor]:
    """A loop over the rows and taps of each document; the last `ahead` taps read later rows."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = []
        for document in x.split(lengths):
            for t in range(len(document)):
                z = torch.zeros(C, dtype=x.dtype) if bias is None else bias
                for w in range(weight.shape[1]):
                    source = t + w - (weight.shape[1] - 1) + ahead
                    if 0 <= source < len(document):
                        z = z + weight[:, w] * document[source]
                rows.append(z / (1 + torch.exp(-z)) if activation == "silu" else z)
        return torch.stack(rows)

    return run


def results(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], probe: Tensor,
            dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    leaves = [t.to(dtype).detach().clone().requires_grad_() for t in arguments]
    y = function(*leaves)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad((y * probe.to(dtype)).sum(), leaves)), strict=False))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(got) == list(expected)
    for name, reference in expected.items():
        assert got[name].shape == reference.shape, name
        assert float((got[name].double() - reference).norm()) <= tolerance * float(reference.norm()), name


def causal(lengths: list[int], **options) -> Callable[..., Tensor]:
    documents = segments(lengths)
    return lambda x, weight, bias=None: causal_conv1d(x, weight, bias, documents, **options)


def centred(lengths: list[int], **options) -> Callable[..., Tensor]:
    documents = segments(lengths)
    return lambda x, weight, bias=None: centred_conv1d(x, weight, bias, documents, **options)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
def test_causal_convolution_of_each_document_alone(lengths, activation):
    arguments = inputs(sum(lengths))
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(separate(lengths, activation, ahead=0), arguments, probe)
    assert_close(results(causal(lengths, activation=activation, implementation="reference"), arguments, probe), expected, 1e-14)
    for implementation in FAST:
        for dtype, tolerance in TOLERANCE.items():
            got = results(causal(lengths, activation=activation, implementation=implementation), arguments, probe, dtype)
            assert_close(got, expected, tolerance)
            assert all(value.dtype == dtype for value in got.values())


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("lengths", ORDERS[2:], ids=str)
def test_centred_convolution_of_each_document_alone(lengths, width):
    arguments = inputs(sum(lengths), width)
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(separate(lengths, None, ahead=width // 2), arguments, probe)
    assert_close(results(centred(lengths, implementation="reference"), arguments, probe), expected, 1e-14)
    for implementation in FAST:
        for dtype, tolerance in TOLERANCE.items():
            assert_close(results(centred(lengths, implementation=implementation), arguments, probe, dtype), expected, tolerance)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("implementation", ALL)
def test_other_widths_without_bias(implementation, width):
    lengths = [1, 2, 3, 40]
    x, weight, _ = inputs(46, width)
    probe = torch.randn_like(x)
    expected = results(separate(lengths, "silu", ahead=0), (x, weight, torch.zeros(C, dtype=torch.float64)), probe)
    del expected["bias"]
    assert_close(results(causal(lengths, implementation=implementation), (x, weight), probe), expected, 1e-14)


@pytest.mark.parametrize("convolution", [causal, centred])
@pytest.mark.parametrize("implementation", ALL)
def test_a_document_moves_no_bit_of_its_neighbours(implementation, convolution):
    x, weight, bias = inputs(57, 5)
    probe = torch.randn_like(x)
    function = convolution([7, 20, 30], implementation=implementation)
    before = results(function, (x, weight, bias), probe, torch.float32)
    changed = torch.cat((x[:7], torch.randn(20, C), x[27:]))
    after = results(function, (changed, weight, bias), probe, torch.float32)
    for name in ("y", "x"):
        kept = [torch.cat((t[name][:7], t[name][27:])) for t in (before, after)]
        assert torch.equal(*kept), name
    assert not torch.equal(before["y"][7:27], after["y"][7:27])


@pytest.mark.parametrize("implementation", FAST)
def test_inputs_and_gradients_with_strides(implementation):
    """A slice of a wider projection, and the gradient of a plain sum, which has strides of 0."""
    lengths = [30, 45]
    x, weight, bias = inputs(75)
    expected = results(separate(lengths, "silu", ahead=0), (x, weight, bias), torch.ones_like(x))
    leaves = [torch.cat((x, x), 1)[:, :C], weight.T.contiguous().T, torch.stack((bias, bias), 1)[:, 0]]
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = causal(lengths, implementation=implementation)(*leaves)
    assert_close(dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y.sum(), leaves)), strict=True)), expected, 1e-14)


@pytest.mark.parametrize("implementation", ALL)
def test_numbers_that_come_back_are_new_documents(implementation):
    x, weight, bias = inputs(20, 5)
    lengths = torch.tensor([6, 1, 5, 2, 6])
    unique, again = (torch.repeat_interleave(torch.tensor(ids), lengths) for ids in ([0, 1, 2, 3, 4], [2, 1, 2, 9, 2]))
    for function in (causal_conv1d, centred_conv1d):
        assert torch.equal(*(function(x, weight, bias, ids, implementation=implementation) for ids in (unique, again)))


@pytest.mark.parametrize("implementation", ALL)
def test_without_tokens(implementation):
    x, weight, bias = inputs(0)
    assert causal_conv1d(x, weight, bias, segments([]), implementation=implementation).shape == x.shape


def test_unknown_activation():
    with pytest.raises(ValueError, match="'silu' or None, not 'relu'"):
        causal([3], activation="relu")(*inputs(3))


def causal_conv1d_fn(x, weight, bias, *, seq_idx, activation):
    """What causal-conv1d's documentation says: documents in its channel-last layout alone."""
    assert x.stride(1) == 1
    assert x.stride(2) % 8 == 0
    assert seq_idx.dtype == torch.int32
    return conv1d_reference(x[0].T, weight, bias, seq_idx[0], activation, 0).T[None]


def test_arguments_of_causal_conv1d(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))
    x, weight, bias = torch.randn(20, 16), torch.randn(16, 4), torch.randn(16)
    again = torch.repeat_interleave(torch.tensor([2, 1, 2]), torch.tensor([6, 1, 13]))
    for rows in (x, torch.randn(20, 19)[:, :16], torch.randn(16, 20).T):  # rows of 19 numbers, and a column after the other
        theirs, ours = (causal_conv1d(rows, weight, bias, again, implementation=name) for name in ("causal_conv1d", "reference"))
        torch.testing.assert_close(theirs, ours)
    for taps, channels, function in ((5, 16, causal_conv1d), (4, 12, causal_conv1d), (3, 16, centred_conv1d)):
        with pytest.raises(ValueError, match="choose another implementation"):
            function(x[:, :channels], torch.randn(channels, taps), None, again, implementation="causal_conv1d")


def test_compiles_whole():
    lengths = [1, 30, 40, 4]
    arguments, probe = inputs(75), torch.randn(75, C, dtype=torch.float64)
    compiled = torch.compile(causal(lengths), fullgraph=True, dynamic=False)
    expected = results(separate(lengths, "silu", ahead=0), arguments, probe)
    assert_close(results(compiled, arguments, probe, torch.float32), expected, TOLERANCE[torch.float32])
