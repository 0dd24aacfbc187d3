"""What is compared: logits, loss and the gradient of every parameter."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import CompileConfig, Config, ParallelConfig
from model import params, speech_lm
from model.context import Context
from model.hub.load import Loaded
from parallel.gather import Reshard
from parallel.mesh import Mesh, make_mesh, start_processes
from training.engine import Engine, Pass


@dataclass(frozen=True)
class Result:
    """Logits of all utterances, their mean loss, and the gradient of every parameter by name (theirs by their own names)."""

    logits: Tensor
    loss: float
    grads: dict[str, Tensor]


def theirs(model: Any, logits: list[Tensor], labels: list[Tensor]) -> Result:
    """From the logits that the owner's model gave for one utterance at a time; leaves the gradients in its parameters."""
    model.zero_grad()
    shifted = torch.cat([torch.cat([one[1:], one.new_tensor([-100])]) for one in labels])
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), shifted)
    loss.backward()
    return Result(torch.cat(logits).detach(), loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def ours(logits: Tensor, loss: Tensor, leaves: dict[str, Tensor]) -> Result:
    """From the logits of all slots that are no padding."""
    trained = {name: w for name, w in leaves.items() if w.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()))
    return Result(logits.detach(), loss.item(), dict(zip(trained, grads, strict=True)))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def single_mesh() -> Mesh:
    """The mesh of this process alone."""
    start_processes(torch.device("cpu"))
    return make_mesh(ParallelConfig(), torch.device("cpu"))


def leaves(loaded: Loaded) -> dict[str, Tensor]:
    """The whole parameters, ready for gradients, and the buffers."""
    kinds = {name: p.kind for name, p in params.named_leaves(speech_lm.model_spec(loaded.cfg))}
    return {name: t.to_local().detach().requires_grad_() if kinds[name] == "param" else t for name, t in loaded.tensors.items()}


def runner(loaded: Loaded, weights: dict[str, Tensor], ctx: Context) -> Pass:
    """What runs the model's functions, eagerly."""
    cfg = Config(model=loaded.cfg)
    cfg.train.ctc_weight = 0
    engine = Engine(speech_lm.spec(cfg), speech_lm.units(cfg), single_mesh(), torch.float32, Reshard(), CompileConfig(enabled=False))
    return Pass(engine, weights, ctx)
