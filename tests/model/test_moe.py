"""Mixture-of-experts and MLP layers against transformers' NemotronH, closed forms of the router, load counts and their balancing."""

import dataclasses

import pytest
import torch
from torch import Tensor

from configs.schema import DecoderConfig, EncoderConfig
from model import mlp, moe, params
from model.context import Context
from model.params import Tree
from parallel import expert

CFG = DecoderConfig(pattern="E", d_model=32, vocab_size=96, n_experts=8, top_k=2, moe_ffn=24, shared_ffn=40, n_group=2, topk_group=1,
                    routed_scaling=2.5, mlp_ffn=48, init_std=0.2)


def context(cfg: DecoderConfig, tokens: int, padding: int = 0, ep_group=None) -> Context:
    """Two utterances, an unused third, and `padding` slots."""
    ends = [0, tokens // 3, tokens - padding, tokens - padding]
    segments = [0] * ends[1] + [1] * (ends[2] - ends[1]) + [3] * padding
    none = torch.zeros(0, dtype=torch.int64)
    return Context(EncoderConfig(), cfg, torch.tensor(ends, dtype=torch.int32), torch.tensor(segments, dtype=torch.int32), none, none, none,
                   none, none, none, 0, ep_group=ep_group)


def weights(cfg: DecoderConfig, spec=moe.spec) -> Tree:
    """Random weights, norm and score correction included."""
    return params.map_named(lambda path, p: p.std * torch.randn(p.shape) + (path == "norm"), spec(cfg))


def nemotron(transformers, cfg: DecoderConfig):
    """One block of transformers' model with our weights, and those weights."""
    config = transformers.NemotronHConfig(
        vocab_size=96, hidden_size=cfg.d_model, hybrid_override_pattern="E-", num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, intermediate_size=cfg.mlp_ffn, n_routed_experts=cfg.n_experts,
        num_experts_per_tok=cfg.top_k, moe_intermediate_size=cfg.moe_ffn, moe_shared_expert_intermediate_size=cfg.shared_ffn,
        n_group=cfg.n_group, topk_group=cfg.topk_group, norm_topk_prob=cfg.norm_topk, routed_scaling_factor=cfg.routed_scaling,
        layer_norm_epsilon=cfg.norm_eps)
    model = transformers.NemotronHForCausalLM(config)
    w, dense = weights(cfg), weights(cfg, mlp.spec)
    names = {"norm.weight": "norm", "mixer.gate.weight": "router.weight", "mixer.gate.e_score_correction_bias": "router.bias",
             "mixer.experts.up_proj": "experts.up", "mixer.experts.down_proj": "experts.down",
             "mixer.shared_experts.up_proj.weight": "shared.up", "mixer.shared_experts.down_proj.weight": "shared.down"}
    flat = dict(params.named_leaves(w))
    model.model.layers[0].load_state_dict({theirs: flat[ours] for theirs, ours in names.items()}, strict=True)
    names = {"norm.weight": "norm", "mixer.up_proj.weight": "up", "mixer.down_proj.weight": "down"}
    model.model.layers[1].load_state_dict({theirs: dense[ours] for theirs, ours in names.items()}, strict=True)
    return model.model.layers, w, dense


VARIANTS = [
    pytest.param({}, id="groups"),
    pytest.param({"n_group": 4, "topk_group": 2, "top_k": 3}, id="2 of 4 groups"),
    pytest.param({"n_group": 1, "top_k": 4, "routed_scaling": 1.3}, id="no groups"),
    pytest.param({"norm_topk": False}, id="weights not divided"),
]


@pytest.mark.parity
@pytest.mark.parametrize("change", VARIANTS)
def test_router_chooses_and_weighs_as_transformers(transformers, change):
    cfg = dataclasses.replace(CFG, **change)
    layers, w, _ = nemotron(transformers, cfg)
    h = torch.randn(50, cfg.d_model)
    _, their_weights, their_ids = layers[0].mixer.gate(h)
    ids, chosen, _ = moe.route(w["router"], h, cfg)
    ids, order = ids.sort()
    their_ids, their_order = their_ids.sort()
    assert torch.equal(ids, their_ids)
    torch.testing.assert_close(chosen.gather(1, order), their_weights.gather(1, their_order), rtol=1e-6, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("change", VARIANTS)
def test_layer_and_gradients_are_those_of_transformers(transformers, change):
    cfg = dataclasses.replace(CFG, **change)
    layers, w, _ = nemotron(transformers, cfg)
    x, probe = torch.randn(50, cfg.d_model, requires_grad=True), torch.randn(50, cfg.d_model)
    theirs = layers[0](x[None])[0]
    expected = torch.autograd.grad((theirs * probe).sum(), (x, *layers[0].parameters()))
    flat = {name: t.requires_grad_() for name, t in params.named_leaves(w) if name != "router.bias"}
    ours, _ = moe.forward(w, x, context(cfg, 50))
    order = ["norm", "experts.up", "experts.down", "router.weight", "shared.up", "shared.down"]
    got = torch.autograd.grad((ours * probe).sum(), (x, *(flat[name] for name in order)))
    for name, value, reference in zip(["y", "x", *order], (ours, *got), (theirs, *expected), strict=True):
        assert float((value - reference).detach().norm()) < 1e-5 * float(reference.detach().norm()), name


@pytest.mark.parity
def test_mlp_layer_is_that_of_transformers(transformers):
    layers, _, w = nemotron(transformers, CFG)
    x = torch.randn(20, CFG.d_model)
    y, stats = mlp.forward(w, x, context(CFG, 20))
    torch.testing.assert_close(y, layers[1](x[None])[0], rtol=1e-5, atol=1e-5)
    assert stats == {}


def test_softmax_router():
    """Qwen3's: softmax over all experts, the best K, divided by their sum."""
    cfg = dataclasses.replace(CFG, router="softmax", n_group=1, routed_scaling=1.0, top_k=3)
    w, h = weights(cfg)["router"], torch.randn(40, cfg.d_model)
    w["bias"].zero_()
    ids, chosen, _ = moe.route(w, h, cfg)
    scores = torch.softmax((h @ w["weight"].T).double(), -1)
    best = scores.topk(3)
    assert torch.equal(ids.sort().values, best.indices.sort().values)
    expected = scores.gather(1, ids) / best.values.sum(-1, keepdim=True)
    torch.testing.assert_close(chosen.double(), expected, rtol=1e-5, atol=0)


def test_forced_balance_gives_all_experts_as_many_tokens():
    cfg = dataclasses.replace(CFG, force_balance=True, top_k=3)
    w, h = weights(cfg)["router"], torch.randn(40, cfg.d_model)
    ids, chosen, _ = moe.route(w, h, cfg)
    assert ids.flatten().bincount().tolist() == [15] * 8
    assert all(len(set(row)) == 3 for row in ids.tolist())
    scores = torch.sigmoid(h @ w["weight"].T).gather(1, ids)
    torch.testing.assert_close(chosen, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_score_correction_moves_the_choice_alone():
    cfg = dataclasses.replace(CFG, n_group=1, norm_topk=False, routed_scaling=1.0)
    w, h = weights(cfg)["router"], torch.randn(40, cfg.d_model)
    w["bias"] = torch.zeros(cfg.n_experts).index_fill(0, torch.tensor([2, 5]), 10.0)
    ids, chosen, _ = moe.route(w, h, cfg)
    assert torch.equal(ids.sort().values, torch.tensor([[2, 5]]).expand(40, 2))
    torch.testing.assert_close(chosen, torch.sigmoid(h @ w["weight"].T).gather(1, ids))


def test_experts_of_other_groups_are_out_whatever_the_correction():
    """Scores below zero are still better than none: of 4 groups of 2 the best one's two experts."""
    cfg = dataclasses.replace(CFG, n_group=4, topk_group=1)
    w, h = weights(cfg)["router"], torch.randn(40, cfg.d_model)
    w["bias"] = torch.full((cfg.n_experts,), -2.0)
    ids, _, _ = moe.route(w, h, cfg)
    best = torch.sigmoid(h @ w["weight"].T).unflatten(1, (4, 2)).sum(-1).argmax(1)
    assert torch.equal(ids.sort().values, torch.stack((2 * best, 2 * best + 1), 1))


def test_router_is_in_fp32_for_bf16_inputs():
    w, h = weights(CFG)["router"], torch.randn(40, CFG.d_model).bfloat16()
    w["weight"] = w["weight"].bfloat16()
    ids, chosen, _ = moe.route(w, h, CFG)
    wide_ids, wide, _ = moe.route({"weight": w["weight"].float(), "bias": w["bias"]}, h.float(), CFG)
    assert chosen.dtype == torch.float32
    assert torch.equal(ids, wide_ids)
    assert torch.equal(chosen, wide)


@pytest.mark.parametrize("change", [{"activation": "swiglu"}, {"shared_ffn": 0}, {"activation": "swiglu", "n_group": 1}], ids=str)
def test_layer_is_a_sum_over_chosen_experts(change):
    """Without transformers' help: what the configurations that NemotronH does not have compute."""
    cfg = dataclasses.replace(CFG, **change)
    w, x = weights(cfg), torch.randn(13, cfg.d_model)
    y, _ = moe.forward(w, x, context(cfg, 13))
    h = x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * w["norm"]
    ids, chosen, _ = moe.route(w["router"], h, cfg)

    def act(z: Tensor) -> Tensor:
        if cfg.activation == "relu2":
            return z.clamp(min=0) ** 2
        gate, up = z.split(z.shape[-1] // 2, -1)
        return gate / (1 + torch.exp(-gate)) * up

    expected = x.clone()
    for t in range(13):
        for k in range(cfg.top_k):
            e = int(ids[t, k])
            expected[t] += chosen[t, k] * (w["experts"]["down"][e] @ act(w["experts"]["up"][e] @ h[t]))
        if cfg.shared_ffn:
            expected[t] += w["shared"]["down"] @ act(w["shared"]["up"] @ h[t])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_load_counts_real_tokens():
    w, x = weights(CFG), torch.randn(30, CFG.d_model)
    y, stats = moe.forward(w, x, context(CFG, 30, padding=7))
    alone, stats_alone = moe.forward(w, x[:23], context(CFG, 23))
    assert torch.equal(stats["expert_load"], stats_alone["expert_load"])
    assert int(stats["expert_load"].sum()) == 23 * CFG.top_k
    ids, _, _ = moe.route(w["router"], moe.rms_norm(x[:23], w["norm"], CFG.norm_eps), CFG)
    assert stats["expert_load"].tolist() == torch.bincount(ids.flatten(), minlength=CFG.n_experts).tolist()
    torch.testing.assert_close(y[:23], alone, rtol=1e-5, atol=1e-5)


def test_padding_goes_through_no_routed_expert():
    cfg = dataclasses.replace(CFG, shared_ffn=0)
    x = torch.randn(30, cfg.d_model)
    y, _ = moe.forward(weights(cfg), x, context(cfg, 30, padding=7))
    assert torch.equal(y[23:], x[23:])
    assert not (y[:23] == x[:23]).all(-1).any()


def test_balancing_raises_the_experts_with_little_load():
    buffers, load = {"router.bias": torch.tensor([0.5, 0.0, -1.0, 2.0])}, {"expert_load": torch.tensor([1, 5, 9, 5])}
    cfg = dataclasses.replace(CFG, bias_update_rate=0.125)
    assert moe.update(buffers, load, cfg)["router.bias"].tolist() == [0.625, 0.0, -1.125, 2.0]
    assert moe.update(buffers, load, dataclasses.replace(CFG, bias_update_rate=0.0)) == buffers
    assert buffers["router.bias"].tolist() == [0.5, 0.0, -1.0, 2.0]


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_balance_loss_is_that_of_gshard_over_real_tokens(router):
    """E sum_e f_e P_e by loops over tokens, and its gradient: that of the scores times E f_e, through the normalisation."""
    cfg = dataclasses.replace(CFG, router=router, n_group=1, aux_loss_coeff=0.5)
    w, x = params.map_named(lambda _, t: t.double(), weights(cfg)), torch.randn(30, cfg.d_model, dtype=torch.float64)
    w["router"]["weight"].requires_grad_()
    _, stats = moe.forward(w, x, context(cfg, 30, padding=7))
    (grad,) = torch.autograd.grad(stats["balance"], w["router"]["weight"])
    h = x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * w["norm"]
    logits = h[:23] @ w["router"]["weight"].detach().T
    scores = logits.sigmoid() if router == "sigmoid" else logits.exp()
    p, f = scores / scores.sum(1, keepdim=True), torch.zeros(8, dtype=torch.float64)
    for score in scores / (1 if router == "sigmoid" else scores.sum(1, keepdim=True)) + w["router"]["bias"]:
        for e in score.argsort()[-2:]:
            f[e] += 1 / (23 * 2)
    torch.testing.assert_close(stats["balance"].detach(), 8 * (f * p.mean(0)).sum(), rtol=1e-12, atol=0)
    slope = scores * (1 - scores) if router == "sigmoid" else scores  # of a score by its logit
    expected = (8 / 23 * (f - (p @ f)[:, None]) * slope / scores.sum(1, keepdim=True)).T @ h[:23]
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-14)


def test_balance_loss_is_one_for_an_even_choice_and_most_where_one_expert_has_all():
    cfg = dataclasses.replace(CFG, n_experts=4, top_k=1)
    real = torch.ones(6, dtype=torch.bool)
    even, one = torch.full((6, 4), 0.3), torch.tensor([[0.0, 0.7, 0.0, 0.0]]).expand(6, 4)
    assert moe.balance_loss(even, real, torch.tensor([2, 1, 2, 1]), cfg) == pytest.approx(1)
    assert moe.balance_loss(one, real, torch.tensor([0, 6, 0, 0]), cfg) == pytest.approx(4)
    assert moe.balance_loss(one, torch.zeros_like(real), torch.tensor([0, 0, 0, 0]), cfg) == 0


def test_without_a_coefficient_there_is_no_balance_loss():
    assert set(moe.forward(weights(CFG), torch.randn(9, CFG.d_model), context(CFG, 9))[1]) == {"expert_load"}


def test_split_experts_compute_their_part(monkeypatch):
    """Both ranks of an expert-parallel pair, with the collectives replaced: the parts sum to the whole layer."""
    w, x = weights(CFG), torch.randn(26, CFG.d_model)
    whole, stats = moe.forward(w, x, context(CFG, 26, padding=3))
    parts: list[Tensor] = []
    for rank in range(2):
        half = slice(4 * rank, 4 * rank + 4)
        mine = {**w, "experts": {name: t[half] for name, t in w["experts"].items()}}

        def routed(local, x, ids, weights, n_experts, group, dispatch, beside, rank=rank):
            assert (n_experts, group, dispatch) == (8, "pair", "allgather")
            parts.append(local(x, ids - 4 * rank, weights))
            return parts[-1], beside()

        monkeypatch.setattr(expert, "routed", routed)
        _, part_stats = moe.forward(mine, x, context(CFG, 26, padding=3, ep_group="pair"))
        assert torch.equal(part_stats["expert_load"], stats["expert_load"])
    monkeypatch.setattr(expert, "routed", lambda *args: (parts[0] + parts[1], args[-1]()))
    joined, _ = moe.forward(mine, x, context(CFG, 26, padding=3, ep_group="pair"))
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


def test_spec_names_and_axes():
    leaves = dict(params.named_leaves(moe.spec(dataclasses.replace(CFG, activation="swiglu"))))
    assert {name: p.shape for name, p in leaves.items()} == {
        "norm": (32,), "router.weight": (8, 32), "router.bias": (8,), "experts.up": (8, 48, 32), "experts.down": (8, 32, 24),
        "shared.up": (80, 32), "shared.down": (32, 40)}
    assert [name for name, p in leaves.items() if p.kind == "buffer"] == ["router.bias"]
    assert [name for name, p in leaves.items() if "experts" in p.axes] == ["experts.up", "experts.down"]
    assert [name for name, p in leaves.items() if not p.decay] == ["norm", "router.bias"]
    assert "shared" not in moe.spec(dataclasses.replace(CFG, shared_ffn=0))


def test_compiled_layers_equal_eager_ones():
    """Expert layers share one graph, whatever the routing and the amount of padding."""
    cfg = dataclasses.replace(CFG, n_group=4, topk_group=2)
    compiled = torch.compile(moe.forward, fullgraph=True, dynamic=False)
    for layer in range(2):
        w = weights(cfg)
        leaves = [t.requires_grad_() for name, t in params.named_leaves(w) if name != "router.bias"]
        x, probe = torch.randn(40, cfg.d_model, requires_grad=True), torch.randn(40, cfg.d_model)
        results = []
        for forward in (moe.forward, compiled):
            with torch.compiler.set_stance("fail_on_recompile" if layer else "default"):
                y, stats = forward(w, x, context(cfg, 40, padding=5 * layer))
                results.append((y, stats["expert_load"], *torch.autograd.grad((y * probe).sum(), (x, *leaves))))
        for eager, fast in zip(*results, strict=True):
            torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-5)
