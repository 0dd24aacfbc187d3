"""Answers to prompts: the packed row of prompts runs once, then every request goes on token by token from what the layers keep.

The prompts run through the graphs of training; before each layer, what it keeps of its input goes into a cache of static shape. A step
then takes one token of each request, whatever their lengths. Weights stay whole in the compute dtype (experts by ep) from their first use
on, for as long as `Weights` lives: gathering them for each token would take longer than the step.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from configs.schema import Config, GenerationConfig
from model import decoder, draws, speech_lm
from model.context import Context
from model.decoder import Cache
from model.stages import own_stages
from parallel.collectives import every_rank
from parallel.gather import Shared
from parallel.mesh import Mesh
from parallel.pipeline import Stage
from training.engine import Engine, Pass
from training.pipeline import from_end, hand_on
from training.step import Batch, make_transfers

CHECK_EVERY = 8  # tokens between the questions whether all ranks are done, on devices that this would hold up


@dataclass(frozen=True)
class Weights:
    """A model to generate with: this rank's leaves and, once they have been used, its whole weights."""

    cfg: Config
    mesh: Mesh
    engine: Engine
    leaves: dict[str, Tensor]
    shared: Shared = field(default_factory=lambda: Shared(holds=True))

    def run(self, context: Context, compiled: bool = True) -> Pass:
        """What runs the model's functions."""
        return Pass(self.engine, self.leaves, context, self.shared, compiled)


def generate(weights: Weights, batch: Batch, context: Context, *, longest: int, stop_ids: Sequence[int],
             names: Sequence[str]) -> list[list[int]]:
    """The answer to each prompt of a packed row, without the token that ends it.

    All ranks must call this together; they stop when the last request of all has ended.

    :param longest: bound on the tokens of a prompt, audio frames included; static, so that the caches are
    :param names: of the requests, the first len(names) documents of the row; what is drawn for one depends on its name alone
    """
    cfg, device = weights.cfg, weights.mesh.device
    requests, limit = len(context.cu_seqlens_U1) - 1, cfg.generation.max_new_tokens
    if int(context.cu_seqlens_U1.diff().max()) > longest:
        raise ValueError(f"a prompt has more than the {longest} tokens that `longest` promises")
    line = Line(weights)
    caches = decoder.new_caches(cfg.model.decoder, requests, longest + limit, context.dtype, device,
                                layers={i for stage in line.own for i in stage.layers})
    lengths_U = context.cu_seqlens_U1.diff().long()
    x_UD = _read_prompts(weights, line, batch, context, caches, longest)
    with torch.no_grad():
        request_U = torch.tensor([zlib.crc32(name.encode()) for name in [*names, *[""] * (requests - len(names))]], device=device)
        done_U = lengths_U == 0
        answers_UL = torch.full((requests, limit), -1, device=device)
        ends = torch.tensor(stop_ids, device=device)
        for i in range(limit):
            run = weights.run(_one_token(context, lengths_U, done_U), cfg.compile.generation)
            chosen_U = torch.zeros_like(lengths_U)
            if x_UD is not None:
                logits_UV = run(speech_lm.head_unit(cfg.model), decoder.logits, x_UD, torch.arange(requests, device=device))
                chosen_U = choose(logits_UV, cfg.generation, request_U, i)
            chosen_U = from_end(line.transfers, chosen_U)
            done_U = done_U | torch.isin(chosen_U, ends)
            answers_UL[:, i] = torch.where(done_U, -1, chosen_U)
            last = i + 1 == limit
            if last or ((device.type == "cpu" or i % CHECK_EVERY == 0) and every_rank(bool(done_U.all()), device)):
                break
            x_UD = _step(run, line, torch.where(done_U, 0, chosen_U), caches, cfg)
            lengths_U = lengths_U + (~done_U).long()
    line.transfers.finish()
    return [[token for token in row if token >= 0] for row in answers_UL[: len(names)].tolist()]


class Line:
    """The stages of this rank, and its way to the others."""

    def __init__(self, weights: Weights):
        cfg, mesh = weights.cfg, weights.mesh
        self.own = own_stages(cfg, mesh.pp_rank)
        self.transfers = make_transfers(cfg, mesh)

    def pass_on(self, tokens: int, compute: Callable[[Stage, Tensor | None], Tensor]) -> Tensor | None:
        """What `compute` gives of the last of all stages, None on the ranks that do not have it."""
        return hand_on(self.transfers, self.own, tokens, compute)


def _read_prompts(weights: Weights, line: Line, batch: Batch, context: Context, caches: list[Cache], longest: int) -> Tensor | None:
    """Fills the caches; behind the last stage the hidden state after each prompt's last token. [U, D]"""
    run, fill = weights.run(context), weights.run(context, weights.cfg.compile.generation)
    kinds = weights.cfg.model.decoder.pattern
    starts_U1 = context.cu_seqlens_U1.long()
    places_L = torch.arange(longest, device=weights.mesh.device)
    slots_UL = torch.where(places_L < starts_U1.diff()[:, None], starts_U1[:-1, None] + places_L, -1)

    def keep(i: int, x_TD: Tensor) -> None:
        if caches[i]:
            with torch.no_grad():
                fill((f"decoder.layers.{i}",), decoder.LAYERS[kinds[i]].fill, x_TD.detach(), caches[i], slots_UL)

    def compute(stage: Stage, x_TD: Tensor | None) -> Tensor:
        if x_TD is None:
            x_AD = speech_lm.encode(run, batch, context, {}) if weights.cfg.model.encoder is not None else None
            x_TD = speech_lm.embed(run, x_AD, batch, context)
        return speech_lm.layers(run, x_TD, context, {}, stage.layers, keep)

    x_TD = line.pass_on(len(batch["tokens_T"]), compute)
    return None if x_TD is None else x_TD.detach()[(starts_U1[1:] - 1).clamp(min=0)]


def _one_token(context: Context, lengths_U: Tensor, done_U: Tensor) -> Context:
    """Each request is a document of one token, which is the next one of its own; those that have ended are padding."""
    numbers = torch.arange(len(lengths_U) + 1, device=lengths_U.device, dtype=torch.int32)
    return replace(context, cu_seqlens_U1=numbers, segments_T=torch.where(done_U, numbers[-1], numbers[:-1]), positions_T=lengths_U)


def _step(run: Pass, line: Line, tokens_U: Tensor, caches: list[Cache], cfg: Config) -> Tensor | None:
    """Behind the last stage the hidden state after one more token of each request. [U, D]"""
    def compute(stage: Stage, x_UD: Tensor | None) -> Tensor:
        x_UD = run(("decoder.embedding",), decoder.embed_text, tokens_U) if x_UD is None else x_UD
        for i in stage.layers:
            x_UD = run((f"decoder.layers.{i}",), decoder.STEPS[cfg.model.decoder.pattern[i]], x_UD, caches[i])
        return x_UD

    return line.pass_on(len(tokens_U), compute)


def choose(logits_UV: Tensor, cfg: GenerationConfig, request_U: Tensor, position: int) -> Tensor:
    """The next token of each request: the likeliest, or one of the fewest likeliest whose probabilities reach top_p, by chance. int64 [U]

    The draw is a function of (seed, request, position): other requests beside it and the number of processes do not matter.
    """
    if cfg.temperature == 0:
        return logits_UV.argmax(-1)
    p_UV, order_UV = torch.softmax(logits_UV.float() / cfg.temperature, -1).sort(dim=-1, descending=True, stable=True)
    before_UV = p_UV.cumsum(-1) - p_UV
    p_UV = torch.where(before_UV < cfg.top_p, p_UV, 0)
    u_U = draws.uniform(torch.full_like(request_U, cfg.seed), request_U, torch.full_like(request_U, position))
    reached_UV = p_UV.cumsum(-1) > (u_U * p_UV.sum(-1))[:, None]
    return order_UV.gather(1, reached_UV.int().argmax(-1, keepdim=True))[:, 0]
