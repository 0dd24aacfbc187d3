"""Norms and rotary positions against their definitions in fp64, PyTorch's own and transformers' layers."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.norm import gated_rms_norm, layer_norm, rms_norm
from model.rope import rotate

T, D, GROUPS, EPS = 13, 24, 3, 0.1
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def inputs() -> tuple[Tensor, ...]:
    """x, gate, weight, bias in fp64, of values that bf16 holds exactly; rows of very different sizes."""
    x = torch.randn(T, D) * torch.logspace(-2, 2, T)[:, None]
    return tuple(t.bfloat16().double() for t in (x, torch.randn(T, D), 1 + 0.3 * torch.randn(D), torch.randn(D)))


def results(function, arguments: tuple[Tensor, ...], probe: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [t.to(dtype).detach().clone().requires_grad_() for t in arguments]
    y = function(*leaves)
    assert y.dtype == dtype
    return [y.detach(), *torch.autograd.grad((y * probe.to(dtype)).sum(), leaves)]


def check(function, definition, arguments: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Outputs and gradients, row by row, so that small rows count as well."""
    probe = torch.randn_like(arguments[0]).bfloat16().double()
    expected = results(definition, arguments, probe, torch.float64)
    for value, reference in zip(results(function, arguments, probe, dtype), expected, strict=True):
        error, size = (value.double() - reference).norm(dim=-1), reference.norm(dim=-1)
        assert bool((error <= TOLERANCE[dtype] * size).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype):
    x, _, weight, _ = inputs()
    check(lambda x, weight: rms_norm(x, weight, EPS), lambda x, weight: weight * x / ((x**2).sum(-1, keepdim=True) / D + EPS) ** 0.5,
          (x, weight), dtype)


@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm(dtype, groups):
    def definition(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        parts = (x * gate / (1 + torch.exp(-gate))).split(D // groups, -1)
        return weight * torch.cat([part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() for part in parts], -1)

    check(lambda x, gate, weight: gated_rms_norm(x, gate, weight, EPS, groups), definition, inputs()[:3], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype):
    x, _, weight, bias = inputs()
    check(lambda x, weight, bias: layer_norm(x, weight, bias, EPS), lambda x, weight, bias: F.layer_norm(x, (D,), weight, bias, EPS),
          (x, weight, bias), dtype)


def test_bf16_is_rounded_once():
    """The weight is multiplied in fp32: results are the nearest bf16 numbers, but for a few that lie on an edge."""
    x, gate, weight, bias = inputs()
    cases = {
        functools.partial(rms_norm, eps=EPS): (x, weight),
        functools.partial(gated_rms_norm, eps=EPS, groups=GROUPS): (x, gate, weight),
        functools.partial(layer_norm, eps=EPS): (x, weight, bias),
    }
    for function, arguments in cases.items():
        narrow = function(*(t.bfloat16() for t in arguments))
        assert float((narrow != function(*arguments).bfloat16()).float().mean()) < 0.01


@pytest.mark.parity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_those_of_nemotron(transformers, dtype):
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    x, gate, weight, _ = (t.to(dtype) for t in inputs())
    norm, gated = theirs.NemotronHRMSNorm(D, eps=EPS), theirs.NemotronHRMSNormGated(D, D // GROUPS, eps=EPS)
    for layer in (norm, gated):
        layer.weight = torch.nn.Parameter(weight)
    torch.testing.assert_close(rms_norm(x, weight, EPS), norm(x), rtol=1e-6, atol=0)
    # theirs rounds before it multiplies the weight; the layer calls it with an fp32 x
    torch.testing.assert_close(gated_rms_norm(x.float(), gate, weight, EPS, GROUPS), gated(x.float(), gate), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_of_pairs(dtype):
    """Coordinates i and i + H/2 are the real and imaginary part of a number that is turned by position * theta^(-2i/H)."""
    heads, size, theta = 2, 8, 100.0
    x, positions = torch.randn(T, heads, size).bfloat16().double(), torch.randint(0, 50, (T,))
    angles = positions[:, None, None] * theta ** (-torch.arange(size // 2, dtype=torch.float64) * 2 / size)

    def definition(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.exp(1j * angles)
        return torch.cat((turned.real, turned.imag), -1)

    check(lambda x: rotate(x, positions, theta), definition, (x,), dtype)


def test_rotation_keeps_its_accuracy_at_high_positions_in_bf16():
    x, positions = torch.randn(T, 1, 8).bfloat16(), torch.arange(T) + 30_000
    wide = rotate(x.double(), positions, 10_000.0)
    assert float((rotate(x, positions, 10_000.0).double() - wide).norm()) < 4e-3 * float(wide.norm())


@pytest.mark.parity
def test_rotation_is_that_of_llama(transformers):
    from transformers.models.llama import modeling_llama as theirs

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16,
                                      rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    q, k, positions = torch.randn(T, 4, 16), torch.randn(T, 2, 16), torch.arange(T) + 5
    cos, sin = theirs.LlamaRotaryEmbedding(config)(q, positions[None])
    for ours, their in zip((q, k), theirs.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin), strict=True):
        torch.testing.assert_close(rotate(ours, positions, 500.0), their[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
