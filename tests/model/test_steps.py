"""One token at a time with a cache equals the whole document at once, for every kind of layer and wherever the prompt ends."""

import dataclasses

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig, RopeScaling
from model import decoder, params
from model.context import Context
from model.params import Tree
from tests.model.token_rows import token_row

CFG = DecoderConfig(pattern="M*WE-", d_model=32, vocab_size=64, n_heads=4, n_kv_heads=2, head_dim=8, mamba_heads=4, mamba_head_dim=16,
                    mamba_groups=2, mamba_state=8, mamba_chunk=16, mlp_ffn=24, n_experts=4, top_k=2, moe_ffn=12, shared_ffn=20)
ALL = dataclasses.replace(
    CFG, rope_theta=100.0, rope_fraction=0.5, rope_scaling=RopeScaling(kind="yarn", factor=4.0, trained_positions=16), qk_norm=True,
    attention_bias=True, mamba_bias=True, mamba_conv_bias=False, mlp_bias=True, post_norm=True, window=5, activation="swiglu",
    moe_latent=20, router="softmax", router_bias=False)
PROMPTS = (1, 2, 3, 4, 15, 16, 17, 33)  # around the convolution's reach, the window and the scan's chunks
STEPS = 20


def weights(kind: str, cfg: DecoderConfig, dtype: torch.dtype) -> Tree:
    return params.map_named(lambda path, p: (0.3 * torch.randn(p.shape) + ("norm" in path)).to(dtype), decoder.LAYERS[kind].spec(cfg))


def slots_of(lengths: tuple[int, ...], longest: int) -> Tensor:
    """Where a row of prompts one after another has the tokens of each."""
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    places = torch.arange(longest)
    return torch.where(places < torch.tensor(lengths)[:, None], starts[:, None] + places, -1)


def one_token(cfg: DecoderConfig, positions_U: Tensor) -> Context:
    return dataclasses.replace(token_row(cfg, [1] * len(positions_U)), positions_T=positions_U, training=False)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("cfg", [CFG, ALL], ids=["plain", "all options"])
@pytest.mark.parametrize("kind", "M*WE-")
def test_steps_continue_the_row(kind: str, cfg: DecoderConfig, dtype: torch.dtype, tolerance: float) -> None:
    w, module = weights(kind, cfg, dtype), decoder.LAYERS[kind]
    whole = [torch.randn(prompt + STEPS, cfg.d_model).to(dtype) for prompt in PROMPTS]
    expected, _ = module.forward(w, torch.cat(whole), token_row(cfg, [len(x) for x in whole]))
    expected = torch.stack([y[-STEPS:] for y in expected.split([len(x) for x in whole])], 1)  # [STEPS, U, D]
    capacity = max(PROMPTS) + STEPS + 3
    (cache,) = decoder.new_caches(dataclasses.replace(cfg, pattern=kind), len(PROMPTS), capacity, dtype, torch.device("cpu"))
    for t in cache.values():
        t.fill_(float("nan"))  # whatever was there before
    if cache:
        prompts = torch.cat([x[:n] for x, n in zip(whole, PROMPTS, strict=True)] + [torch.randn(5, cfg.d_model).to(dtype)])
        module.fill(w, prompts, cache, slots_of(PROMPTS, max(PROMPTS) + 2), token_row(cfg, PROMPTS, padding=5))
    for step in range(STEPS):
        x_UD = torch.stack([x[n + step] for x, n in zip(whole, PROMPTS, strict=True)])
        y_UD = decoder.STEPS[kind](w, x_UD, cache, one_token(cfg, torch.tensor(PROMPTS) + step))
        assert float((y_UD - expected[step]).norm()) <= tolerance * float(expected[step].norm()), step


def test_finished_requests_touch_no_other() -> None:
    """Experts leave out tokens of segments beyond the requests; the others' results keep every bit."""
    w, x = weights("E", CFG, torch.float32), torch.randn(6, CFG.d_model)
    ctx = one_token(CFG, torch.zeros(6, dtype=torch.int64))
    done = dataclasses.replace(ctx, segments_T=torch.tensor([0, 6, 2, 6, 4, 5], dtype=torch.int32))
    y, z = (decoder.STEPS["E"](w, x, {}, c) for c in (ctx, done))
    assert torch.equal(y[[0, 2, 4, 5]], z[[0, 2, 4, 5]])


def test_caches_have_static_shapes() -> None:
    caches = decoder.new_caches(CFG, 3, 50, torch.bfloat16, torch.device("cpu"))
    assert [{name: (tuple(t.shape), t.dtype) for name, t in cache.items()} for cache in caches] == [
        {"window": ((3, 3, 64 + 2 * 2 * 8), torch.bfloat16), "state": ((3, 4, 16, 8), torch.float32)},
        *[{"k": ((3, 50, 2, 8), torch.bfloat16), "v": ((3, 50, 2, 8), torch.bfloat16)}] * 2, {}, {}]
