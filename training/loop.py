"""The training run: data -> step -> log -> validate -> checkpoint, until the last step or a signal."""

import functools
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data.loader import decoding_batches, empty_batch, validation_batches
from data.plan import resumed
from data.sources import validation_names
from data.tokenizer import Tokenizer
from kernels.linear import use_libraries
from model import lora, params
from model.hub.adapter import load_adapter
from model.hub.family import HubError
from model.hub.load import load, read_config
from model.stages import own_spec
from parallel import sharding
from parallel.collectives import any_rank, host_group, sum_over_ranks
from parallel.mesh import Mesh
from training import checkpoint, evaluation, optimizer
from training.config import to_dict
from training.generation import Weights
from training.rows import read_once, training_batches
from training.scoring import word_error_rate
from training.state import State
from training.step import make_engine, make_state, make_step, state_dtype, to_device, warm_up
from training.telemetry import Meter, Telemetry, compilations, expert_load, to_floats

WARM_UP_STEPS = 10  # steps after which nothing may compile any more
EXAMPLES = 8  # transcripts shown of each validation set


class RunError(RuntimeError):
    """A run that cannot go on; the message is one sentence."""


@dataclass
class Outcome:
    """What a finished run reports."""

    steps: int = 0
    train_seconds: float = 0.0
    recompiles_after_warmup: int = 0
    interrupted: bool = False
    wer: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> word error rate of each validation set


class Interruption:
    """SIGTERM and SIGINT ask for a checkpoint and the end; the ranks agree on it between two steps."""

    def __init__(self) -> None:
        self.asked = False
        self.hosts = host_group()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)
        print("stopping after this step, with a checkpoint; once more stops at once, without", file=sys.stderr, flush=True)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks must call this together."""
        return any_rank(self.asked, torch.device("cpu"), self.hosts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Host tensors of all ranks added up."""
        return sum_over_ranks(tensor, self.hosts)


class Run:
    """One training run. Everything that changes is `state`, `position` (in the data) and what is reported."""

    def __init__(self, cfg: Config, mesh: Mesh, tokenizer: Tokenizer, open_telemetry: Callable[[int], Telemetry]):
        self.cfg, self.mesh, self.tokenizer, self.run_dir = cfg, mesh, tokenizer, Path(cfg.run_dir)
        known, told = ({}, []) if checkpoint_to_resume(cfg) else pretrained(cfg, mesh)
        fresh = make_state(cfg, mesh, known)
        self.state, self.position, notes = resume(cfg, fresh, mesh)
        self.telemetry = open_telemetry(self.state.step)
        for note in told + notes:
            self.telemetry.note(note)
        self.loader = training_batches(cfg, mesh, self.position)
        self.engine = make_engine(cfg, mesh)
        self.step = make_step(cfg, mesh, self.engine)
        self.interruption, self.outcome = Interruption(), Outcome()
        self.best = checkpoint.best(self.run_dir)
        self.metrics: dict[str, Tensor] = {}  # of the last step, on the device
        self.skipped: dict[str, int] = {}  # utterances left out so far, by reason
        self.saved_step = self.state.step

    def train(self) -> Outcome:
        """All steps that are left, with what belongs between them."""
        cfg, started = self.cfg.train, time.perf_counter()
        if self.cfg.compile.enabled:
            self.telemetry.note("compiling every kind of layer: a minute or two, seconds when it has been done before")
        self.warm_up()
        if cfg.decode_at_start and self.state.step == 0:
            self.telemetry.note("transcribing the validation sets before the first step")
            self.decode()
        self.meter = Meter()
        warm_after, recent = self.state.step + WARM_UP_STEPS, []
        compiled = compilations()
        while self.state.step < cfg.steps and not self.outcome.interrupted:
            self.metrics = self.advance()
            recent.append(self.metrics["loss_lm"])
            if self.state.step == warm_after:
                compiled = compilations()
            if self._due(cfg.log_every):
                self.log(torch.stack(recent).mean())
                recent = []
            with self.meter.paused():
                self._between_steps()
            self.outcome.interrupted = self.interruption.agreed()
        self.outcome.steps, self.outcome.recompiles_after_warmup = self.state.step, compilations() - compiled
        if not self.outcome.interrupted:
            self._finish()
        if self.saved_step != self.state.step:
            self.save()
        self.outcome.train_seconds = time.perf_counter() - started
        return self.outcome

    def warm_up(self) -> None:
        """Compile every row size for training and for evaluation, on rows of nothing, before the first step; changes no state."""
        for size in self.cfg.data.rows:
            batch = empty_batch(size, self.cfg.data.encoder, self.cfg.data.queries)
            warm_up(self.cfg, self.mesh, self.engine, self.state, to_device(batch, self.mesh))
            evaluation.validation_loss(self.cfg, self.mesh, self.engine, self.state, [batch])

    def advance(self) -> dict[str, Tensor]:
        """One optimizer step on the next batches of every rank."""
        with self.meter.waiting():
            batches = [next(self.loader) for _ in range(self.cfg.train.accumulate)]
        self.state, metrics = self.step(self.state, [to_device(batch, self.mesh) for batch in batches])
        self.position = batches[-1]["state"]
        self.skipped = batches[-1]["counters"]
        rows = [(round(batch["fill"] * len(batch["tokens_T"])), len(batch["tokens_T"]), batch["audio_sec"]) for batch in batches]
        self.meter.add(*(sum(figures) / self.mesh.sizes.alike for figures in zip(*rows, strict=True)))  # other ranks count them too
        self.telemetry.tick(self.state.step)
        return metrics

    def log(self, loss: Tensor) -> None:
        """Write and show this logging interval, whose mean loss is `loss`; the only place where figures leave the device."""
        metrics = self.metrics
        loads = {name.removesuffix(".expert_load"): value for name, value in metrics.items() if name.endswith(".expert_load")}
        scalars = {name: value for name, value in metrics.items() if name in ("grad_norm", "loss_ctc", "loss_balance")}
        values = to_floats({"loss": loss, **scalars, **expert_load(loads)})
        self._refuse_nonfinite(values["loss"], values["grad_norm"])
        values |= {"lr": optimizer.learning_rate(self.state.step - 1, self.cfg.optimizer, self.cfg.train.steps)}
        values |= {f"skipped/{reason}": count for reason, count in self.skipped.items() if count}
        self.telemetry.log_step(self.state.step, values | self.meter.flush(self.interruption.sum))

    def validate(self) -> None:
        """Loss on every validation set; a checkpoint when their mean is the best so far."""
        losses = []
        for name in validation_names(self.cfg.data):
            batches = read_once(functools.partial(validation_batches, self.cfg.data, name), self.mesh)
            figures = evaluation.validation_loss(self.cfg, self.mesh, self.engine, self.state, batches)
            self.telemetry.log_validation(self.state.step, name, figures)
            losses.append(figures["loss"])
        mean = sum(losses) / max(1, len(losses))
        if losses and (self.best is None or mean < self.best[1]):
            self.best = self.save(), mean
            checkpoint.mark_best(self.run_dir, *self.best, self.mesh)

    def decode(self) -> None:
        """Transcripts and word error rate of every validation set."""
        weights = Weights(self.cfg, self.mesh, self.engine, self.state.leaves())
        self.outcome.wer[self.state.step] = {}
        if self.cfg.model.encoder is None:
            return  # a text has no reference to be heard against
        for name in validation_names(self.cfg.data):
            batches = list(read_once(functools.partial(decoding_batches, self.cfg.data, name), self.mesh))
            found = evaluation.transcribe(weights, batches, self.tokenizer)
            figures = word_error_rate(found)
            examples = [(t.reference, t.hypothesis) for t in found[:EXAMPLES]]
            picture = evaluation.mel_picture(self.cfg, self.mesh, to_device(batches[0], self.mesh)) if batches else None
            self.telemetry.log_validation(self.state.step, name, figures, examples, picture)
            self.outcome.wer[self.state.step][name] = figures["wer"]

    def save(self) -> Path:
        """A checkpoint of the present state, unless its last step went wrong."""
        if self.metrics:
            self._refuse_nonfinite(self.metrics["loss"].item(), self.metrics["grad_norm"].item())
        self.saved_step = self.state.step
        return checkpoint.save(self.run_dir, self.state, self.position, self.mesh, self.cfg.train.keep_checkpoints, to_dict(self.cfg))

    def _refuse_nonfinite(self, loss: float, grad_norm: float) -> None:
        if not math.isfinite(loss + grad_norm):
            raise RunError(f"the loss is {loss} and the gradient norm {grad_norm} at step {self.state.step}; lower optimizer.lr or look at "
                           "the data of the last steps, and start again from the last checkpoint")

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _between_steps(self) -> None:
        if self._due(self.cfg.train.validate_every):
            self.validate()
        if self._due(self.cfg.train.decode_every):
            self.decode()
        if self._due(self.cfg.train.checkpoint_every) and self.saved_step != self.state.step:
            self.save()

    def _finish(self) -> None:
        if self.cfg.train.validate_every and not self._due(self.cfg.train.validate_every):
            self.validate()
        if self.state.step not in self.outcome.wer:
            self.decode()


def pretrained(cfg: Config, mesh: Mesh) -> tuple[dict[str, Any], list[str]]:
    """Tensors of the published models that a run starts from, by dotted path, and what to tell the user about them."""
    tensors: dict[str, Any] = {}
    notes = []
    own = [name for name, _ in params.named_leaves(own_spec(cfg, mesh.pp_rank))]
    for path, part in ((cfg.model.pretrained, ("",)), (cfg.model.pretrained_encoder, ("encoder.",))):
        if path is not None:
            try:
                loaded = load(Path(path), mesh, cfg.model, state_dtype(cfg), tuple(name for name in own if name.startswith(part)))
            except HubError as error:
                raise RunError(f"{path}: {error}") from error
            tensors |= loaded.tensors
            notes += [f"starting from {path}: {loaded.family.name}, {len(loaded.tensors)} tensors", *loaded.notes]
    if cfg.model.lora.start is not None:
        adapter = started_adapter(cfg, mesh, tensors)
        tensors |= adapter
        notes.append(f"starting from the adapter {cfg.model.lora.start}: {len(adapter)} tensors")
    return tensors, notes


def started_adapter(cfg: Config, mesh: Mesh, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of model.lora.start, sharded, for the model whose own tensors are `tensors`."""
    spec = dict(params.named_leaves(own_spec(cfg, mesh.pp_rank)))
    wanted = {path: tensors[path].full_tensor() for path in lora.targets(spec, cfg.model.lora.targets)} if cfg.model.lora.dora else {}
    try:
        family, _ = read_config(Path(str(cfg.model.pretrained)))
        whole = load_adapter(Path(str(cfg.model.lora.start)), wanted, family, cfg.model)
    except HubError as error:
        raise RunError(f"model.lora.start={cfg.model.lora.start}: {error}") from error
    return {path: sharding.shard(spec[path], tensor.to(state_dtype(cfg)), mesh) for path, tensor in whole.items() if path in spec}


def checkpoint_to_resume(cfg: Config) -> Path | None:
    """The checkpoint that a run goes on from."""
    named = Path(cfg.train.resume)
    return {"auto": checkpoint.newest(Path(cfg.run_dir)), "never": None}.get(cfg.train.resume, checkpoint.find(named) or named)


def resume(cfg: Config, state: State, mesh: Mesh) -> tuple[State, Any, list[str]]:
    """The state to start from, this rank's position in the data, and what to tell the user about it."""
    path = checkpoint_to_resume(cfg)
    if path is None:
        return state, None, []
    tables = {name: p.drawn for name, p in params.named_leaves(own_spec(cfg, mesh.pp_rank)) if p.drawn is not None}
    state, meta = checkpoint.load(path, state, mesh, tables)
    use_libraries(meta.get("libraries", {}))
    notes, total = [f"resuming from {path} at step {state.step}"], meta["config"]["train"]["steps"]
    if total != cfg.train.steps:
        notes.append(f"train.steps is {cfg.train.steps} and was {total}: from here on the learning rate follows the new schedule")
    states = checkpoint.data_states(meta)
    if states and states[0]["world"] != mesh.dp:
        notes.append(f"{mesh.dp} data-parallel ranks share what {states[0]['world']} left of the epoch, and a step has {mesh.dp} x "
                     f"{cfg.train.accumulate} rows; set train.accumulate if it should have as many as before")
    return state, resumed(states, mesh.dp_rank, mesh.dp) if states else None, notes
