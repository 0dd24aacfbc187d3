"""Low-rank updates: against merged matrices in fp64, values and gradients, for every kind of layer; dropout as a pure function."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Config, DecoderConfig, EncoderConfig, LoraConfig, ModelConfig
from model import decoder, fastconformer, lora, params, speech_lm
from model.context import Context
from model.draws import of_slots
from model.linear import linear
from model.lora import Adapted
from model.params import P, Tree
from tests.model.rows import audio_row
from tests.model.token_rows import token_row

SMALL = DecoderConfig(pattern="M*E-", d_model=32, vocab_size=64, n_heads=4, n_kv_heads=2, head_dim=8, rope_theta=100.0, mamba_heads=4,
                      mamba_head_dim=16, mamba_groups=2, mamba_state=8, mamba_chunk=16, mlp_ffn=24, n_experts=4, top_k=2, moe_ffn=12,
                      shared_ffn=20, mlp_bias=True, attention_bias=True, activation="swiglu")
LENGTHS = (13, 1, 22)
ALL = LoraConfig(rank=3, alpha=6.0, targets=[""])
PLAIN = [r".*\.(q|k|v|o)\.weight", ".*proj$", ".*up$", ".*down$"]
VARIANTS = {"lora": ALL, "rslora": dataclasses.replace(ALL, rslora=True),
            "dora": dataclasses.replace(ALL, dora=True, targets=[r"(?!.*experts).*"])}


def drawn(spec: Tree, dtype: torch.dtype = torch.float64) -> Tree:
    """Random values, those of adapters included, that start at zero."""
    return params.map_named(lambda path, p: (0.3 * torch.randn(p.shape) + ("norm" in path)).to(dtype), spec)


def leaves_of(w: Tree) -> dict[str, Tensor]:
    return {path: t.requires_grad_() for path, t in params.named_leaves(w)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", "M*E-")
def test_a_layer_multiplies_as_with_merged_matrices(kind: str, variant: str) -> None:
    cfg, ctx = VARIANTS[variant], token_row(SMALL, LENGTHS, 3)
    w = drawn(lora.extend(decoder.LAYERS[kind].spec(SMALL), cfg))
    x = torch.randn(sum(LENGTHS) + 3, SMALL.d_model, dtype=torch.float64)
    forward = decoder.LAYERS[kind].forward
    y, _ = lora.binder(cfg)(forward)(w, x, ctx)
    flat = dict(params.named_leaves(w))
    merged = params.map_named(lambda path, _: lora.merge(path, flat.__getitem__, flat, cfg), decoder.LAYERS[kind].spec(SMALL))
    expected, _ = forward(merged, x, ctx)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(y, forward(lora_free(w), x, ctx)[0], rtol=1e-3)


def lora_free(w: Tree) -> Tree:
    return {name: lora_free(t) for name, t in w.items() if not name.endswith(lora.SUFFIX)} if isinstance(w, dict) else w


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_definition(variant: str) -> None:
    """DoRA (section 4.3 of its paper): the length of the updated rows counts as a constant."""
    cfg = VARIANTS[variant]
    w = drawn(lora.extend({"matrix": P((6, 5), ("ffn", "embed"))}, cfg))
    x, probe = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    leaves = leaves_of(w)
    trained = {name: t for name, t in leaves.items() if name != "matrix"}
    y = linear(x, lora.bound(w, cfg, token_row(SMALL, LENGTHS))["matrix"])
    got = torch.autograd.grad((y * probe).sum(), list(trained.values()))
    factor = 6.0 / 3**0.5 if cfg.rslora else 2.0
    whole = leaves["matrix"] + factor * leaves["matrix_lora.b"] @ leaves["matrix_lora.a"]
    if cfg.dora:
        m = leaves["matrix"].norm(dim=1).detach() * (1 + leaves["matrix_lora.magnitude"])
        whole = (m / whole.norm(dim=1).detach())[:, None] * whole
    torch.testing.assert_close(y, x @ whole.T, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((x @ whole.T * probe).sum(), list(trained.values()))
    for name, a, b in zip(trained, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_step_starts_from_the_frozen_model(variant: str) -> None:
    cfg, ctx = VARIANTS[variant], token_row(SMALL, LENGTHS)
    x = torch.randn(sum(LENGTHS), SMALL.d_model)
    for kind, layer in {k: decoder.LAYERS[k] for k in "M*E-"}.items():
        w = params.init(lora.extend(layer.spec(SMALL), cfg), seed=1)
        torch.testing.assert_close(lora.binder(cfg)(layer.forward)(w, x, ctx)[0], layer.forward(lora_free(w), x, ctx)[0], msg=kind)


def test_an_encoder_can_be_adapted_too() -> None:
    encoder = EncoderConfig(mel_bins=16, d_model=16, n_layers=1, n_heads=2, conv_norm="layer_norm", subsampling_channels=8)
    _, ctx = audio_row([torch.randn(5000), torch.randn(9000)], encoder)
    spec = lora.extend(fastconformer.layer_spec(encoder), ALL)
    assert {name for name, _ in params.named_leaves(spec) if name.endswith(".a")} == {
        f"{place}_lora.a" for place in (*(f"feed_forward{i}.linear{j}.weight" for i in (1, 2) for j in (1, 2)),
                                        *(f"self_attn.linear_{n}.weight" for n in ("q", "k", "v", "out", "pos")))}
    w, x = drawn(spec), torch.randn(len(ctx.audio_segments_A), 16, dtype=torch.float64)
    flat = dict(params.named_leaves(w))
    merged = params.map_named(lambda path, _: lora.merge(path, flat.__getitem__, flat, ALL), fastconformer.layer_spec(encoder))
    ctx = dataclasses.replace(ctx, dtype=torch.float64)
    y = lora.binder(ALL)(fastconformer.forward)(w, x, ctx)[0]
    torch.testing.assert_close(y, fastconformer.forward(merged, x, ctx)[0], rtol=1e-10, atol=1e-10)


def model(**changes: Any) -> Config:
    encoder = EncoderConfig(mel_bins=16, d_model=16, n_layers=1, n_heads=2, subsampling_channels=8)
    return Config(model=ModelConfig(encoder=encoder, decoder=SMALL, **changes))


def test_the_tree_of_an_adapted_model() -> None:
    before = dict(params.named_leaves(speech_lm.spec(model(freeze_params=[r"decoder\."]))))
    cfg = LoraConfig(rank=3, targets=[r"decoder\.layers\.", "encoder.*linear_q"], ranks={r"decoder\.layers\.1\.q": 7})
    after = dict(params.named_leaves(speech_lm.spec(model(freeze_params=[r"decoder\."], lora=cfg))))
    assert {name: (p.shape, p.axes) for name, p in before.items()} == {
        name: (p.shape, p.axes) for name, p in after.items() if lora.SUFFIX not in name}
    added = {name: p for name, p in after.items() if lora.SUFFIX in name}
    assert all(p.trained for p in added.values())
    assert not any(p.trained for name, p in after.items() if name.startswith("decoder.") and name not in added)
    adapted = {name.partition(lora.SUFFIX)[0] for name in added}
    assert not any(after[name].trained for name in adapted)
    assert adapted == {"encoder.layers.0.self_attn.linear_q.weight", *(f"decoder.layers.{name}" for name in (
        "0.in_proj", "0.out_proj", "1.q.weight", "1.k.weight", "1.v.weight", "1.o.weight", "2.experts.up", "2.experts.down",
        "2.shared.up", "2.shared.down", "3.up", "3.down"))}
    assert added["decoder.layers.1.q.weight_lora.a"].shape == (7, 32)
    assert added["decoder.layers.1.q.weight_lora.b"].axes == ("queries", "rank")
    assert added["decoder.layers.2.experts.up_lora.a"].shape == (4, 3, 32)
    assert added["decoder.layers.2.experts.up_lora.b"].axes == ("experts", "ffn", "rank")
    assert speech_lm.spec(model(lora=LoraConfig(rank=0, targets=[""]))) == speech_lm.spec(model())


SALT = torch.tensor([12345.0])


def row(lengths: tuple[int, ...], draw: int = 5) -> Context:
    return dataclasses.replace(token_row(SMALL, lengths), draw=torch.tensor(draw))


def test_dropout_acts_on_the_update_alone_and_only_in_training() -> None:
    w: dict[str, Any] = {name: torch.randn(shape) for name, shape in (("weight", (6, 512)), ("a", (3, 512)), ("b", (6, 3)))}
    x, ctx = torch.randn(50, 512), row((30, 20))
    adapted = Adapted(**w, scale=2.0, magnitude=None, dropout=0.25, salt=SALT, ctx=ctx)
    keep = of_slots(SALT, ctx, 50, 512) >= 0.25
    assert keep.float().mean().item() == pytest.approx(0.75, abs=0.01)
    expected = x @ w["weight"].T + 2 * (torch.where(keep, x / 0.75, 0) @ w["a"].T) @ w["b"].T
    torch.testing.assert_close(linear(x, adapted), expected, rtol=1e-5, atol=1e-3)
    cfg = LoraConfig(rank=3, dropout=0.25, targets=[""])
    for training in (True, False):
        tree = {"m": w["weight"], "m_lora": {"a": w["a"], "b": w["b"], "salt": SALT}}
        tree = lora.bound(tree, cfg, dataclasses.replace(ctx, training=training))
        assert tree["m"].dropout == (0.25 if training else 0.0)


def test_salts_differ_by_path_and_seed() -> None:
    spec = lora.extend({"x": P((4, 4), ("ffn", "embed")), "y": P((4, 4), ("ffn", "embed"))}, LoraConfig(rank=2, dropout=0.1, targets=[""]))
    salts = [params.init(spec, seed)[f"{name}_lora"]["salt"].item() for seed in (0, 1) for name in "xy"]
    assert len(set(salts)) == 4
    assert spec["x_lora"]["salt"].kind == "buffer"


def test_compiled_layers_share_one_graph_and_equal_eager_ones() -> None:
    cfg = LoraConfig(rank=3, dropout=0.2, dora=True, targets=[""])
    forward = lora.binder(cfg)(decoder.LAYERS["*"].forward)
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    for lengths, draw, stance in (((13, 20), 1, "default"), ((30, 3), 2, "fail_on_recompile")):
        ctx = row(lengths, draw)
        w, x = drawn(lora.extend(decoder.LAYERS["*"].spec(SMALL), cfg), torch.float32), torch.randn(33, SMALL.d_model)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(w, x, ctx)[0], forward(w, x, ctx)[0], rtol=1e-4, atol=1e-4)
