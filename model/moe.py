"""Mixture-of-experts layer: a router in fp32, routed experts, and a shared expert that sees every token."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import DecoderConfig
from kernels.activation import expansion, widen
from kernels.experts import experts
from model import mlp
from model.context import Context
from model.linear import affine
from model.norm import add, residual_norms, rms_norm
from model.params import P, Tree
from parallel import expert, sequence
from parallel.collectives import sum_start, wait


def spec(cfg: DecoderConfig) -> Tree:
    """norm, router, experts, and shared, latent_in and latent_out where the model has them.

    The router's axis has a name of its own: every rank scores all experts, also where the experts themselves are split.
    """
    width, inner = expansion(cfg.activation) * cfg.moe_ffn, cfg.moe_latent or cfg.d_model
    tree = {
        **residual_norms(cfg),
        "router": {"weight": P((cfg.n_experts, cfg.d_model), ("scores", "embed"), std=cfg.init_std)},
        "experts": {
            "up": P((cfg.n_experts, width, inner), ("experts", "ffn", "embed"), std=cfg.init_std),
            "down": P((cfg.n_experts, inner, cfg.moe_ffn), ("experts", "embed", "ffn"), std=cfg.init_std),
        },
    }
    if cfg.router_bias:
        tree["router"]["bias"] = P((cfg.n_experts,), ("scores",), "zeros", kind="buffer")  # score correction
    if cfg.moe_latent:
        tree["latent_in"] = _projection((inner, cfg.d_model), ("latent", "embed"), cfg)
        tree["latent_out"] = _projection((cfg.d_model, inner), ("embed", "latent"), cfg)
    return tree | {"shared": mlp.products(cfg, cfg.shared_ffn)} if cfg.shared_ffn else tree


def _projection(shape: tuple[int, int], axes: tuple[str, str], cfg: DecoderConfig) -> Tree:
    return {"weight": P(shape, axes, std=cfg.init_std), **({"bias": P(shape[:1], axes[:1], "zeros")} if cfg.mlp_bias else {})}


def forward(w: Tree, x_TD: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
    """x + routed experts(norm(x)) + shared expert(norm(x)), and "expert_load": how many real tokens chose each expert [E]; with
    aux_loss_coeff also "balance", see `balance_loss`.

    With ctx.ep_group, w["experts"] holds this rank's part of the experts.
    """
    cfg = ctx.decoder
    h_TD = rms_norm(x_TD, w["norm"], cfg.norm_eps)
    ids_TK, weights_TK, scores_TE = route(w["router"], h_TD, cfg)
    real_T = sequence.own_tokens(ctx.segments_T, ctx) < ctx.cu_seqlens_U1.shape[0] - 1
    ids_TK = torch.where(real_T[:, None], ids_TK, cfg.n_experts)  # padding computes nothing
    load_E = (ids_TK[..., None] == torch.arange(cfg.n_experts, device=ids_TK.device)).sum((0, 1))
    counted_E = sum_start(load_E, ctx.stage_group) if cfg.aux_loss_coeff and ctx.stage_group is not None else None
    inner_TD = affine(w["latent_in"], h_TD) if cfg.moe_latent else h_TD

    def shared() -> Tensor | None:
        return mlp.apply(w["shared"], h_TD, cfg.shared_ffn, ctx) if cfg.shared_ffn else None

    y_TD, shared_TD = _routed(w["experts"], inner_TD, ids_TK, weights_TK, ctx, shared)
    if cfg.moe_latent:
        y_TD = affine(w["latent_out"], y_TD)
    if shared_TD is not None:
        y_TD = y_TD + shared_TD
    stats = {"expert_load": load_E}
    if cfg.aux_loss_coeff:
        stats["balance"] = balance_loss(scores_TE, real_T, load_E if counted_E is None else wait(counted_E), cfg)
    return add(w, x_TD, y_TD, cfg), stats


def _routed(w: Tree, h_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, ctx: Context,
            beside: Callable[[], Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """What the chosen experts give, and what `beside` does, while tokens travel."""
    local = functools.partial(experts, up_EFD=w["up"], down_EDF=w["down"], activation=ctx.decoder.activation, keep_hidden=ctx.keep_hidden)
    if ctx.ep_group is None:
        return local(h_TD, ids_TK, weights_TK), beside()
    return expert.routed(local, h_TD, ids_TK, weights_TK, ctx.decoder.n_experts, ctx.ep_group, ctx.ep_dispatch, beside)


def route(w: Tree, h_TD: Tensor, cfg: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of each token, their weights, and the scores of all experts, in fp32. [T, K], [T, K], [T, E]

    The score correction (DeepSeek-V3's loss-free balancing) moves the choice alone; the weights are the scores as they are.
    """
    logits_TE = torch.nn.functional.linear(widen(h_TD), widen(w["weight"]))
    scores_TE = logits_TE.sigmoid() if cfg.router == "sigmoid" else logits_TE.softmax(-1)
    with torch.no_grad():
        if cfg.force_balance:
            ids_TK = torch.arange(len(h_TD) * cfg.top_k, device=h_TD.device).view(-1, cfg.top_k) % cfg.n_experts
        else:
            choice_TE = scores_TE + w["bias"] if cfg.router_bias else scores_TE
            ids_TK = torch.topk(_within_groups(choice_TE, cfg), cfg.top_k, sorted=False).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if cfg.norm_topk:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * cfg.routed_scaling, scores_TE


def balance_loss(scores_TE: Tensor, real_T: Tensor, load_E: Tensor, cfg: DecoderConfig) -> Tensor:
    """This rank's share of E * sum_e f_e P_e (Switch Transformer, GShard), which is 1 where all experts are chosen equally often.

    f_e is the share of choices that fell on expert e, P_e its mean probability, the token's scores divided by their sum, both over the real
    tokens of all ranks. The shares of the ranks add up to it, and so do their gradients, since choices have none.

    :param load_E: choices of each expert by the tokens of all ranks
    """
    probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    sums_E = torch.where(real_T[:, None], probs_TE, 0).sum(0)
    choices = load_E.sum().clamp(min=1)  # top_k for each token
    return cfg.n_experts * cfg.top_k * torch.dot(load_E.to(sums_E.dtype) / choices, sums_E / choices)


def _within_groups(choice_TE: Tensor, cfg: DecoderConfig) -> Tensor:
    """The scores to choose by, -inf outside the `topk_group` groups whose two best experts have the largest sum."""
    if cfg.n_group == 1:
        return choice_TE
    choice_TGE = choice_TE.unflatten(1, (cfg.n_group, -1))
    groups = torch.topk(choice_TGE.topk(2).values.sum(-1), cfg.topk_group, sorted=False).indices
    chosen_TG = (groups[..., None] == torch.arange(cfg.n_group, device=groups.device)).any(1)
    return choice_TGE.masked_fill(~chosen_TG[..., None], float("-inf")).flatten(1)


def update(buffers: dict[str, Tensor], stats: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
    """Loss-free balancing: the score correction of experts with less than the mean load rises, of those with more it falls."""
    if cfg.bias_update_rate == 0:
        return buffers
    load_E = stats["expert_load"].float()
    return {"router.bias": buffers["router.bias"] + cfg.bias_update_rate * torch.sign(load_E.mean() - load_E)}
