"""Training in a few lines of Python: what the command line does, a call at a time. docs/checkpoints.md has an example."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.schema import Config
from model import lora
from model.hub.load import read_config
from model.hub.save import save
from model.params import P
from parallel.mesh import Mesh, make_mesh, start_processes
from parallel.validate import validate
from training import config, evaluation, launch
from training.config import ConfigError
from training.engine import Engine
from training.loop import pretrained
from training.rows import training_batches
from training.state import State
from training.step import Batch, make_engine, make_state, make_step, to_device


@dataclass(frozen=True)
class Session:
    """A configured model on its mesh; what changes is in the State beside it. Every rank calls the same methods in the same order."""

    cfg: Config
    mesh: Mesh
    engine: Engine
    _step: Callable[[State, Sequence[Batch]], tuple[State, dict[str, Tensor]]]

    def batches(self) -> Iterator[dict[str, Any]]:
        """This rank's packed rows, without end."""
        return training_batches(self.cfg, self.mesh)

    def loss(self, state: State, batch: dict[str, Any]) -> float:
        """Mean cross-entropy of the batch's supervised tokens over all ranks: the forward pass alone."""
        return evaluation.validation_loss(self.cfg, self.mesh, self.engine, state, [batch])["loss"]

    def step(self, state: State, batches: Sequence[dict[str, Any]]) -> tuple[State, dict[str, Tensor]]:
        """The state after forward, backward and AdamW on these micro-batches, and the figures of the step."""
        return self._step(state, [to_device(batch, self.mesh) for batch in batches])

    def export(self, state: State, out: Path) -> None:
        """Write a folder like model.pretrained, which its owner's class opens; adapters are added to their matrices."""
        if self.cfg.model.pretrained is None or self.cfg.parallel.pp > 1:
            raise ConfigError("export writes a folder like model.pretrained, with parallel.pp=1; else convert a checkpoint with "
                              "python -m model.hub convert")
        like, whole = Path(self.cfg.model.pretrained), {**state.params, **state.buffers}

        def fetch(path: str, p: P) -> Tensor:
            if p.kind == "buffer":
                return whole[path]
            return lora.merge(path, lambda name: whole[name].to(self.mesh.device).full_tensor(), whole, self.cfg.model.lora)

        save(out, read_config(like)[0], self.cfg.model, fetch, like=like, writes=self.mesh.rank == 0)


def start(overrides: Sequence[str]) -> tuple[Session, State]:
    """What `train.py OVERRIDES` starts with: its configuration, its processes under torchrun, its tensors, published or drawn.

    :raises ConfigError: with a sentence for everything that cannot run
    """
    cfg, problems = config.load(overrides)
    problems += validate(cfg, launch.environment(*sys.argv))
    if problems:
        raise ConfigError("; ".join(problems))
    device = launch.pick_device()
    start_processes(device)
    mesh = make_mesh(cfg.parallel, device)
    known, _ = pretrained(cfg, mesh)
    engine = make_engine(cfg, mesh)
    state = make_state(cfg, mesh, known)
    return Session(cfg, mesh, engine, make_step(cfg, mesh, engine)), state
