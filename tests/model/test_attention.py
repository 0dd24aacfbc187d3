"""Attention layer: against transformers' NemotronH and Qwen3, packed documents against separate ones, padding, compilation."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig, RopeScaling
from model import attention, params
from model.context import Context
from model.params import Tree
from parallel import sequence
from tests.model.token_rows import token_row

CFG = DecoderConfig(pattern="*", d_model=32, n_heads=4, n_kv_heads=2, head_dim=16)
ALL = dataclasses.replace(CFG, rope_theta=100.0, qk_norm=True, attention_bias=True)
NEMOTRON_NAMES = {"norm": "norm.weight", **{f"{name}.weight": f"mixer.{name}_proj.weight" for name in "qkvo"}}
QWEN_NAMES = {
    **{f"{name}.{part}": f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")},
    "norm": "input_layernorm.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}


def weights(cfg: DecoderConfig, dtype: torch.dtype = torch.float32) -> Tree:
    """Random weights, norms around 1."""
    return params.map_named(lambda path, p: (0.3 * torch.randn(p.shape) + ("norm" in path)).to(dtype), attention.spec(cfg))


def results(forward, w: Tree, x: Tensor, probe: Tensor, ctx: Context) -> dict[str, Tensor]:
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(w)}
    x = x.detach().requires_grad_()
    y, stats = forward(w, x, ctx)
    assert stats == {}
    grads = torch.autograd.grad((y * probe).sum(), (x, *leaves.values()))
    return dict(zip(["y", "x", *leaves], (y.detach(), *grads), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, floor: float = 0.0) -> None:
    """`floor`: what a gradient that is zero by its definition may be."""
    assert list(got) == list(expected)
    for name, reference in expected.items():
        assert float((got[name] - reference).norm()) <= tolerance * float(reference.norm()) + floor, name


def loaded(layer: torch.nn.Module, w: Tree, names: dict[str, str]) -> dict[str, Tensor]:
    """Their parameters by our names, after giving them our weights."""
    missing = layer.load_state_dict({names[name]: t.detach() for name, t in params.named_leaves(w)}, strict=False)
    assert not missing.unexpected_keys
    assert not [key for key in missing.missing_keys if key in names.values()]
    parameters = dict(layer.named_parameters())
    return {name: parameters[names[name]] for name, _ in params.named_leaves(w)}


@pytest.mark.parity
@pytest.mark.parametrize("tokens", [1, 40, 150])
def test_layer_and_gradients_are_those_of_nemotron(transformers, tokens):
    config = transformers.NemotronHConfig(
        vocab_size=96, hidden_size=CFG.d_model, hybrid_override_pattern="*", num_attention_heads=CFG.n_heads,
        num_key_value_heads=CFG.n_kv_heads, head_dim=CFG.head_dim, mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
        layer_norm_epsilon=CFG.norm_eps)
    layer = transformers.NemotronHForCausalLM(config).model.layers[0]
    w = weights(CFG)
    theirs = loaded(layer, w, NEMOTRON_NAMES)
    x, probe = torch.randn(tokens, CFG.d_model), torch.randn(tokens, CFG.d_model)
    got = results(attention.forward, w, x, probe, token_row(CFG, [tokens]))
    x = x.requires_grad_()
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    y = layer(x[None], attention_mask=mask)[0]
    grads = torch.autograd.grad((y * probe).sum(), (x, *theirs.values()))
    floor = 1e-4 if tokens == 1 else 0  # a single token has nothing to choose from, so q and k get no gradient
    assert_close(got, dict(zip(got, (y.detach(), *grads), strict=True)), 1e-5, floor)


@pytest.mark.parity
def test_rotation_norms_and_biases_are_those_of_qwen3(transformers):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    tokens = 70
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=ALL.d_model, intermediate_size=8, num_hidden_layers=1, num_attention_heads=ALL.n_heads,
        num_key_value_heads=ALL.n_kv_heads, head_dim=ALL.head_dim, rms_norm_eps=ALL.norm_eps, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ALL.rope_theta}, attn_implementation="eager")
    layer, w = Qwen3DecoderLayer(config, 0), weights(ALL)
    theirs = loaded(layer, w, QWEN_NAMES)
    x, probe = torch.randn(tokens, ALL.d_model), torch.randn(tokens, ALL.d_model)
    got = results(attention.forward, w, x, probe, token_row(ALL, [tokens]))
    x = x.requires_grad_()
    rotation = Qwen3RotaryEmbedding(config)(x[None], torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    y = x + layer.self_attn(layer.input_layernorm(x[None]), position_embeddings=rotation, attention_mask=mask)[0][0]
    grads = torch.autograd.grad((y * probe).sum(), (x, *theirs.values()))
    assert_close(got, dict(zip(got, (y.detach(), *grads), strict=True)), 1e-5)


LENGTHS = [[1, 2, 3, 63, 64, 65, 100], [100, 65, 1, 64, 3, 63, 2], [0, 63, 1, 140, 0, 2, 0]]


@pytest.mark.parametrize("cfg", [CFG, ALL], ids=["plain", "all options"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_documents_are_separate_ones(cfg, lengths):
    w, padding, total = weights(cfg, torch.float64), 5, sum(lengths) + 5
    x, probe = (torch.randn(total, cfg.d_model, dtype=torch.float64) for _ in range(2))
    probe[-padding:] = 0
    packed = results(attention.forward, w, x, probe, token_row(cfg, lengths, padding))
    parts = [results(attention.forward, w, a, p, token_row(cfg, [len(a)]))
             for a, p in zip(x[:-padding].split(lengths), probe[:-padding].split(lengths), strict=True) if len(a)]
    joined = {name: torch.stack([part[name] for part in parts]).sum(0) for name in packed if name not in ("y", "x")}
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("y", "x")} | joined
    packed |= {name: packed[name][:-padding] for name in ("y", "x")}
    assert_close(packed, joined, 1e-13)


def test_padding_keeps_its_input():
    w, x, probe = weights(ALL), torch.randn(30, ALL.d_model), torch.randn(30, ALL.d_model)
    got = results(attention.forward, w, x, probe, token_row(ALL, [10, 13], padding=7))
    assert torch.equal(got["y"][23:], (x + w["o"]["bias"].detach())[23:])
    assert torch.equal(got["x"][23:], probe[23:])
    x[23:] *= 3
    again = results(attention.forward, w, x, probe, token_row(ALL, [10, 13], padding=7))
    assert all(torch.equal(again[name], got[name]) for name in got if name not in ("y", "x"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_document_does_not_move_another_by_a_bit(dtype):
    w, x, probe = weights(ALL, dtype), torch.randn(290, ALL.d_model).to(dtype), torch.randn(290, ALL.d_model).to(dtype)
    ctx = token_row(ALL, [21, 140, 122], padding=7)
    first = results(attention.forward, w, x, probe, ctx)
    for changed in (slice(0, 21), slice(161, 283), slice(283, 290)):
        other = x.clone()
        other[changed] = 3 * torch.randn(other[changed].shape).to(dtype)
        again = results(attention.forward, w, other, probe, ctx)
        assert not torch.equal(again["y"][changed], first["y"][changed])
        for name in ("y", "x"):
            assert torch.equal(again[name][21:161], first[name][21:161]), (name, changed)


def test_bf16_is_near_fp64():
    w, x, probe = weights(ALL, torch.bfloat16), torch.randn(50, ALL.d_model).bfloat16(), torch.randn(50, ALL.d_model).bfloat16()
    ctx = token_row(ALL, [20, 25], padding=5)
    wide = params.map_named(lambda _, t: t.detach().double(), w)
    got = results(attention.forward, w, x, probe, ctx)
    assert all(t.dtype == torch.bfloat16 for t in got.values())
    assert_close(got, results(attention.forward, wide, x.double(), probe.double(), ctx), 2e-2)


def test_spec():
    leaves = dict(params.named_leaves(attention.spec(CFG)))
    assert {name: p.shape for name, p in leaves.items()} == {
        "norm": (32,), "q.weight": (64, 32), "k.weight": (32, 32), "v.weight": (32, 32), "o.weight": (32, 64)}
    assert all("embed" in p.axes for p in leaves.values())
    more = dict(params.named_leaves(attention.spec(ALL)))
    assert {name: p.shape for name, p in more.items() if name not in leaves} == {
        "q.bias": (64,), "k.bias": (32,), "v.bias": (32,), "o.bias": (32,), "q_norm": (16,), "k_norm": (16,)}
    assert [name for name, p in more.items() if p.decay] == ["q.weight", "k.weight", "v.weight", "o.weight"]


def test_compiled_layers_equal_eager_ones():
    """Layers share one graph, whatever the boundaries and the amount of padding."""
    compiled = torch.compile(attention.forward, fullgraph=True, dynamic=False)
    for lengths, padding in (([13, 20], 7), ([40, 0], 0)):
        w, x, probe = weights(ALL), torch.randn(40, ALL.d_model), torch.randn(40, ALL.d_model)
        ctx = token_row(ALL, lengths, padding)
        with torch.compiler.set_stance("fail_on_recompile" if padding == 0 else "default"):
            assert_close(results(compiled, w, x, probe, ctx), results(attention.forward, w, x, probe, ctx), 1e-5)


@pytest.mark.parametrize("scaling", [
    RopeScaling("dynamic", 4.0, 8),
    RopeScaling("longrope", 4.0, 8, short_factors=[1.0 + i for i in range(8)], long_factors=[2.0 + 3 * i for i in range(8)]),
], ids=lambda scaling: scaling.kind)
def test_positions_that_depend_on_the_length_see_their_own_document(scaling: RopeScaling) -> None:
    """A row against each document alone, the same in parts as two ranks have it, and a next token against a document that it ends."""
    cfg, lengths = dataclasses.replace(ALL, rope_scaling=scaling), (5, 8, 9, 26)
    w, x = weights(cfg, torch.float64), torch.randn(48 + 4, CFG.d_model, dtype=torch.float64)
    row = token_row(cfg, lengths, padding=4)
    alone = [attention.forward(w, part, token_row(cfg, [len(part)]))[0] for part in x[:48].split(lengths)]
    torch.testing.assert_close(attention.forward(w, x, row)[0][:48], torch.cat(alone), rtol=1e-12, atol=1e-12)
    plain, _ = attention.forward(w, x[:48], token_row(dataclasses.replace(cfg, rope_scaling=RopeScaling()), lengths))
    assert ((plain - torch.cat(alone)).norm(dim=1) > 1e-3)[-25:].all()
    groups: list[Any] = [SimpleNamespace(size=lambda: 2, rank=lambda r=r: r) for r in range(2)]
    for group in groups:
        half = dataclasses.replace(row, cp_group=group)
        positions = sequence.own_slots(row.positions_T, half)
        sizes = torch.tensor([*lengths, 0])[sequence.own_slots(row.segments_T, half).long()]
        assert torch.equal(attention._lengths(positions, half)[sizes > 0], sizes[sizes > 0])
    last, cache = x[22:48], attention.new_cache(cfg, 1, 30, torch.float64, torch.device("cpu"))
    attention.fill(w, last[:-1], cache, torch.arange(25)[None], token_row(cfg, [25]))
    attention.step(w, last[-1:], cache, dataclasses.replace(token_row(cfg, [1]), positions_T=torch.tensor([25])))
    _, key, _ = attention._heads(w, last, token_row(cfg, [26]), "qkv")
    torch.testing.assert_close(cache["k"][0, 25], key[25], rtol=1e-12, atol=1e-12)
