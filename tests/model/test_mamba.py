"""Mamba-2 layer: against transformers' NemotronH, packed documents against separate ones, padding, compilation."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig
from model import mamba, params
from model.params import Tree
from tests.model.token_rows import token_row

CFG = DecoderConfig(pattern="M", d_model=32, mamba_heads=4, mamba_head_dim=16, mamba_groups=2, mamba_state=8, mamba_conv=4, mamba_chunk=16,
                    time_step_min=0.02, time_step_max=0.3)
THEIR_NAMES = {
    "norm": "norm.weight", "in_proj": "mixer.in_proj.weight", "conv.weight": "mixer.conv1d.weight", "conv.bias": "mixer.conv1d.bias",
    "a_log": "mixer.A_log", "d": "mixer.D", "dt_bias": "mixer.dt_bias", "gate_norm": "mixer.norm.weight",
    "out_proj": "mixer.out_proj.weight"}


def weights(cfg: DecoderConfig = CFG, dtype: torch.dtype = torch.float32) -> Tree:
    """Weights that all matter: none is 0 or 1, some steps lie below the limit."""

    def draw(path: str, p: params.P) -> Tensor:
        t = params.draw(path, dataclasses.replace(p, std=0.2), 0) + 0.2 * torch.randn(p.shape)
        return (t - 2 * (torch.arange(len(t)) % 2) if path == "dt_bias" else t).to(dtype)

    return params.map_named(draw, mamba.spec(cfg))


def results(forward, w: Tree, x: Tensor, probe: Tensor, ctx) -> dict[str, Tensor]:
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(w)}
    x = x.detach().requires_grad_()
    y, stats = forward(w, x, ctx)
    assert stats == {}
    grads = torch.autograd.grad((y * probe).sum(), (x, *leaves.values()))
    return dict(zip(["y", "x", *leaves], (y.detach(), *grads), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(got) == list(expected)
    for name, reference in expected.items():
        assert float((got[name] - reference).norm()) <= tolerance * float(reference.norm()), name


@pytest.mark.parity
@pytest.mark.parametrize("tokens", [1, 3, 16, 37])
def test_layer_and_gradients_are_those_of_transformers(transformers, tokens):
    config = transformers.NemotronHConfig(
        vocab_size=96, hidden_size=CFG.d_model, hybrid_override_pattern="M", num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        mamba_num_heads=CFG.mamba_heads, mamba_head_dim=CFG.mamba_head_dim, n_groups=CFG.mamba_groups, ssm_state_size=CFG.mamba_state,
        conv_kernel=CFG.mamba_conv, chunk_size=8, layer_norm_epsilon=CFG.norm_eps, time_step_min=CFG.time_step_min)
    layer = transformers.NemotronHForCausalLM(config).model.layers[0]
    w = weights()
    shapes = {name: t.shape for name, t in layer.state_dict().items()}
    flat = {theirs: params.subtree(w, ours).detach().reshape(shapes[theirs]) for ours, theirs in THEIR_NAMES.items()}
    layer.load_state_dict(flat, strict=True)
    x, probe = torch.randn(tokens, CFG.d_model), torch.randn(tokens, CFG.d_model)
    got = results(mamba.forward, w, x, probe, token_row(CFG, [tokens]))

    x = x.requires_grad_()
    theirs, parameters = layer(x[None])[0], dict(layer.named_parameters())
    grads = torch.autograd.grad((theirs * probe).sum(), (x, *(parameters[THEIR_NAMES[name]] for name in list(got)[2:])))
    expected = dict(zip(got, (theirs.detach(), *(g.reshape(got[name].shape) for name, g in zip(list(got)[1:], grads, strict=True))),
                        strict=True))
    assert_close(got, expected, 1e-5)


LENGTHS = [[1, 2, 3, 63, 64, 65, 100], [100, 65, 1, 64, 3, 63, 2], [63, 1, 100, 2, 64, 65, 3], [0, 3, 0, 18, 1, 0]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_documents_are_separate_ones(lengths):
    padding = 5
    w, total = weights(dtype=torch.float64), sum(lengths) + padding
    x, probe = torch.randn(total, CFG.d_model, dtype=torch.float64), torch.randn(total, CFG.d_model, dtype=torch.float64)
    packed = results(mamba.forward, w, x, probe, token_row(CFG, lengths, padding))
    parts = [results(mamba.forward, w, a, p, token_row(CFG, [len(a)]))
             for a, p in zip(x.split([*lengths, padding]), probe.split([*lengths, padding]), strict=True) if len(a)]
    joined = {name: torch.stack([part[name] for part in parts]).sum(0) for name in packed if name not in ("y", "x")}
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("y", "x")} | joined
    assert_close(packed, joined, 1e-13)


def test_order_of_documents_does_not_matter():
    w = weights(dtype=torch.float64)
    documents = [torch.randn(n, CFG.d_model, dtype=torch.float64) for n in (2, 19, 35)]
    alone = [mamba.forward(w, x, token_row(CFG, [len(x)]))[0] for x in documents]
    for order in itertools.permutations(range(3)):
        row = torch.cat([documents[u] for u in order])
        packed = mamba.forward(w, row, token_row(CFG, [len(documents[u]) for u in order]))[0]
        torch.testing.assert_close(packed, torch.cat([alone[u] for u in order]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_document_does_not_move_another_by_a_bit(dtype):
    w, x, probe = weights(dtype=dtype), torch.randn(90, CFG.d_model).to(dtype), torch.randn(90, CFG.d_model).to(dtype)
    ctx = token_row(CFG, [21, 40, 22], padding=7)
    first = results(mamba.forward, w, x, probe, ctx)
    for changed in (slice(0, 21), slice(61, 83), slice(83, 90)):
        other = x.clone()
        other[changed] = 3 * torch.randn(other[changed].shape).to(dtype)
        again = results(mamba.forward, w, other, probe, ctx)
        for name in ("y", "x"):
            assert not torch.equal(again[name][changed], first[name][changed])
            assert torch.equal(again[name][21:61], first[name][21:61]), (name, changed)


def test_bf16_is_near_fp64():
    w, x, probe = weights(dtype=torch.bfloat16), torch.randn(50, CFG.d_model).bfloat16(), torch.randn(50, CFG.d_model).bfloat16()
    ctx = token_row(CFG, [20, 30])
    wide = params.map_named(lambda _, t: t.detach().double(), w)
    got = results(mamba.forward, w, x, probe, ctx)
    assert all(t.dtype == torch.bfloat16 for t in got.values())
    assert_close(got, results(mamba.forward, wide, x.double(), probe.double(), ctx), 2e-2)


def test_spec():
    leaves = dict(params.named_leaves(mamba.spec(CFG)))
    assert {name: p.shape for name, p in leaves.items()} == {
        "norm": (32,), "in_proj": (64 + 96 + 4, 32), "conv.weight": (96, 4), "conv.bias": (96,), "a_log": (4,), "d": (4,), "dt_bias": (4,),
        "gate_norm": (64,), "out_proj": (32, 64)}
    assert [name for name, p in leaves.items() if p.decay] == ["in_proj", "conv.weight", "out_proj"]
    assert [name for name, p in leaves.items() if "embed" in p.axes] == ["norm", "in_proj", "out_proj"]


def test_initial_values():
    cfg = dataclasses.replace(CFG, mamba_heads=4096, mamba_head_dim=1, time_step_min=0.001, time_step_max=0.1)
    w = params.init(mamba.spec(cfg), 0)
    rates, steps = w["a_log"].exp(), torch.nn.functional.softplus(w["dt_bias"])
    assert 1 <= float(rates.min()) < 1.1 < 15.9 < float(rates.max()) <= 16
    assert abs(float(rates.mean()) - 8.5) < 0.3
    assert 0.00099 < float(steps.min()) < 0.00105 < 0.095 < float(steps.max()) < 0.1001
    assert abs(float(steps.log().mean()) - math.log(0.01)) < 0.1
    assert all(bool((w[name] == 1).all()) for name in ("norm", "gate_norm", "d"))
    assert not w["conv"]["bias"].any()
    assert abs(float(w["conv"]["weight"].std()) - 12**-0.5) < 0.01


def test_compiled_layers_equal_eager_ones():
    """Layers share one graph, whatever the boundaries and the amount of padding."""
    compiled = torch.compile(mamba.forward, fullgraph=True, dynamic=False)
    for lengths, padding in (([13, 20], 7), ([40, 0], 0)):
        w, x, probe = weights(), torch.randn(40, CFG.d_model), torch.randn(40, CFG.d_model)
        ctx = token_row(CFG, lengths, padding)
        with torch.compiler.set_stance("fail_on_recompile" if padding == 0 else "default"):
            assert_close(results(compiled, w, x, probe, ctx), results(mamba.forward, w, x, probe, ctx), 1e-5)
