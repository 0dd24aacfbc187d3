"""Options that published decoders need, together: one graph equals eager, packed equals separate, and each option changes the result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig, RopeScaling
from model import decoder, params
from model.context import Context
from tests.model.token_rows import token_row

ALL = DecoderConfig(
    pattern="WEM-*", d_model=32, vocab_size=40, vocab_multiple=16, post_norm=True, n_heads=4, n_kv_heads=2, head_dim=8, rope_theta=1e4,
    rope_fraction=0.5, rope_scaling=RopeScaling("yarn", factor=4.0, trained_positions=16), attention_bias=True, attention_out_bias=False,
    window=5, qk_norm=True, mamba_heads=4, mamba_head_dim=8, mamba_groups=2, mamba_state=8, mamba_chunk=8, mamba_bias=True,
    mamba_conv_bias=False, mlp_ffn=24, mlp_bias=True, activation="swiglu", n_experts=8, top_k=2, moe_ffn=16, shared_ffn=20, moe_latent=12,
    router="softmax", router_bias=False)
LENGTHS, PADDING = (19, 1, 26), 4


def weights(cfg: DecoderConfig) -> Any:
    g = torch.Generator().manual_seed(0)
    return params.map_named(lambda path, p: (torch.randn(p.shape, generator=g) * 0.3 + ("norm" in path)).double(), decoder.spec(cfg))


def loss(w: Any, tokens_T: Tensor, labels_T: Tensor, ctx: Context) -> Tensor:
    x_TD = decoder.embed_text(w["embedding"], tokens_T, ctx)
    for i in range(len(ctx.decoder.pattern)):
        x_TD, _ = decoder.layer(ctx.decoder, i)(w["layers"][i], x_TD, ctx)
    return decoder.loss(w["head"], x_TD, labels_T, ctx)


def evaluated(cfg: DecoderConfig, compiled: bool = False, lengths: tuple[int, ...] = LENGTHS, first: int = 0) -> dict[str, Tensor]:
    """Loss and gradients of documents of random tokens, which start at token `first` of a fixed text."""
    g = torch.Generator().manual_seed(1)
    text = torch.randint(cfg.vocab_size, (sum(LENGTHS) + 1,), generator=g)
    total, padding = sum(lengths), PADDING if len(lengths) > 1 else 0
    pad = torch.zeros(padding, dtype=torch.int64)
    tokens, labels = torch.cat([text[first : first + total], pad]), torch.cat([text[first + 1 : first + total + 1], pad - 100])
    ctx = replace(token_row(cfg, lengths, padding), dtype=torch.float64)
    leaves = {name: t.requires_grad_() for name, t in params.named_leaves(weights(cfg))}
    tree = params.map_named(lambda path, _: leaves[path], decoder.spec(cfg))
    run = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else loss
    value = run(tree, tokens, labels, ctx)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return {"loss": value.detach(), **dict(zip(leaves, grads, strict=True))}


def test_one_graph_equals_eager_ones() -> None:
    got, expected = evaluated(ALL, compiled=True), evaluated(ALL)
    for name, reference in expected.items():
        torch.testing.assert_close(got[name], reference, rtol=1e-9, atol=1e-9)


def test_packed_documents_are_separate_ones() -> None:
    packed = evaluated(ALL)
    starts = [sum(LENGTHS[:u]) for u in range(len(LENGTHS))]
    parts = [evaluated(ALL, lengths=(n,), first=start) for n, start in zip(LENGTHS, starts, strict=True)]
    for name, reference in packed.items():
        torch.testing.assert_close(sum(part[name] for part in parts), reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("change", [
    dict(window=4), dict(rope_fraction=1.0), dict(rope_scaling=RopeScaling("linear", factor=4.0)),
    dict(rope_scaling=RopeScaling("llama3", factor=4.0, trained_positions=16)),
    dict(rope_scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.0)), dict(norm_topk=False), dict(routed_scaling=1.0)])
def test_every_option_counts(change: dict[str, Any]) -> None:
    assert abs(evaluated(replace(ALL, **change))["loss"] - evaluated(ALL)["loss"]) > 1e-3


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    padded, plain = evaluated(ALL), evaluated(replace(ALL, vocab_multiple=1))
    table = weights(ALL)["embedding"]["weight"]
    assert table.shape == (48, 32)
    assert not padded["embedding.weight"][40:].any()
    assert not padded["head.weight"][40:].any()
    assert padded["loss"] > 0
    assert plain["head.weight"].shape == (40, 32)


def test_llama3_keeps_high_frequencies_and_divides_low_ones() -> None:
    from model.rope import _slowed

    frequencies = torch.tensor([1.0, 0.3, 0.02, 1e-3], dtype=torch.float64)
    got = _slowed(frequencies, 1e4, RopeScaling("llama3", factor=8.0, trained_positions=128, low_frequency=1.0, high_frequency=4.0))
    turns = frequencies * 128 / (2 * torch.pi)  # 20.4, 6.1, 0.41, 0.02
    assert (turns[:2] > 4).all()
    assert (turns[2:] < 1).all()
    torch.testing.assert_close(got, torch.tensor([1.0, 0.3, 0.02 / 8, 1e-3 / 8], dtype=torch.float64))
    (middle,) = _slowed(torch.tensor([0.1], dtype=torch.float64), 1e4, RopeScaling("llama3", 8.0, 128))
    kept = (0.1 * 128 / (2 * torch.pi) - 1) / 3
    assert middle.item() == pytest.approx(0.1 * (kept + (1 - kept) / 8))
