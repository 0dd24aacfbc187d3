"""The decoder alone on packed text: the trainer's engine, layers and optimizer without the speech encoder, for benchmarks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import CompileConfig, DecoderConfig, EncoderConfig, OptimizerConfig, ParallelConfig
from model import decoder, params
from model.context import Context
from model.params import Tree
from parallel.gather import Reshard
from parallel.mesh import Mesh, make_mesh, start_processes
from training import optimizer
from training.engine import Engine, Pass

OPTIMIZER = OptimizerConfig()


@dataclass
class Row:
    """Utterances of token numbers one after another, padded to a fixed number of slots."""

    tokens_T: Tensor
    labels_T: Tensor  # the utterance's next token, -100 at its last one and on padding
    context: Context
    labels: int  # supervised tokens


def single_process() -> Mesh:
    """The mesh of this process alone."""
    device = torch.device("cpu")
    start_processes(device)
    return make_mesh(ParallelConfig(), device)


def pack(utterances: Sequence[Tensor], slots: int, cfg: DecoderConfig, dtype: torch.dtype) -> Row:
    """The packed row of some utterances. [slots]"""
    lengths = torch.tensor([len(u) for u in utterances])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    padding = slots - int(ends[-1])
    labels = torch.cat([torch.cat([u[1:], u.new_tensor([-100])]) for u in utterances])
    segments = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.cat([lengths, torch.tensor([padding])]))
    positions = torch.arange(slots) - ends[segments]
    none = torch.zeros(0, dtype=torch.int64)
    context = Context(EncoderConfig(), cfg, ends.int(), segments.int(), positions, none, none, none, none, none, 0, dtype=dtype)
    return Row(torch.cat([*utterances, none.new_zeros(padding)]), torch.cat([labels, none.new_full((padding,), -100)]), context,
               int((labels != -100).sum()))


def units(cfg: DecoderConfig) -> Iterator[tuple[str, ...]]:
    """What is gathered and compiled together, in the order of use."""
    yield ("embedding",)
    yield from ((f"layers.{i}",) for i in range(len(cfg.pattern)))
    yield ("head",)


class TextModel:
    """Parameters, AdamW moments and compiled functions of one decoder in one process."""

    def __init__(self, cfg: DecoderConfig, dtype: torch.dtype, weights: Tree, mesh: Mesh):
        spec = decoder.spec(cfg)
        self.cfg, self.dtype, self.steps = cfg, dtype, 0
        self.engine = Engine(spec, units(cfg), mesh, dtype, reshard=Reshard(), compile=CompileConfig())
        self.params, self.buffers = params.split_kinds(spec, weights)
        self.first, self.second = ({name: torch.zeros_like(w) for name, w in self.params.items()} for _ in range(2))
        self.decayed = {name for name, p in params.named_leaves(spec) if p.decay}

    def hidden(self, row: Row, run: Pass) -> Tensor:
        x_TD = run(("embedding",), decoder.embed_text, row.tokens_T)
        for i in range(len(self.cfg.pattern)):
            x_TD, _ = run((f"layers.{i}",), decoder.layer(self.cfg, i), x_TD)
        return x_TD

    def step(self, row: Row) -> Tensor:
        """Forward, backward and AdamW; the mean loss."""
        weights = {name: w.requires_grad_() for name, w in self.params.items()}
        run = Pass(self.engine, weights | self.buffers, row.context)
        loss = run(("head",), decoder.loss, self.hidden(row, run), row.labels_T) / row.labels
        grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        with torch.no_grad():
            optimizer.update(weights, grads, self.first, self.second, self.steps, OPTIMIZER.lr, OPTIMIZER, self.decayed)
        self.steps += 1
        return loss.detach()

    @torch.no_grad()
    def logits(self, row: Row, buffers: dict[str, Any] | None = None) -> Tensor:
        """fp32 logits of all slots. [T, V]"""
        run = Pass(self.engine, self.params | (buffers or self.buffers), row.context)
        return run(("head",), decoder.logits, self.hidden(row, run), torch.arange(len(row.tokens_T)))
