"""From the command line to a running job: refuse what cannot work, say what the run is, run it, report a failure in one sentence."""

import fcntl
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

import torch

from configs.schema import Config
from data.errors import DataError
from data.sources import training_source, validation_names, validation_source
from data.tokenizer import load_tokenizer
from kernels.linear import libraries, use_libraries
from model import lora, params, speech_lm
from model.lengths import FRAME_SEC
from model.stages import own_spec, own_stages, stages, waiting
from parallel import deepep, sharding
from parallel.collectives import from_first_rank, wait_for_all
from parallel.mesh import Mesh, make_mesh, start_processes, stop_processes
from parallel.names import zero_stage
from parallel.validate import Environment, validate
from training import checkpoint, config
from training.evaluation import stops
from training.loop import Outcome, Run, RunError
from training.progress import RunSummary, banner
from training.step import DTYPES, master_dtype, moment_dtype, offload_of, state_dtype
from training.telemetry import EVENTS_DIR, Telemetry

REFUSED = 2  # exit status


def rank() -> int:
    """This process's number, also before any process group exists."""
    return int(os.environ.get("RANK", 0))


def world() -> int:
    """Number of processes, also before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", 1))


def environment(*command: str) -> Environment:
    """What rules may know of this process.

    :param command: as typed, without the launcher
    """
    return Environment(world(), " ".join(command), deepep.available(), torch.cuda.is_available())


def refuse(sentences: Sequence[str]) -> NoReturn:
    """End with the sentences, printed once: every rank comes to the same ones."""
    if rank() == 0:
        print(*(f"error: {sentence}" for sentence in sentences), sep="\n", file=sys.stderr, flush=True)
    tell_launcher("\n".join(f"error: {sentence}" for sentence in sentences))
    sys.exit(REFUSED)


def tell_launcher(reason: str) -> None:
    """Let torchrun end its own report, which follows ours, with the reason; it reads a file that it has named."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": about}))


def show(arguments: Sequence[str]) -> str:
    """What `--cfg job` prints: the resolved configuration, sizes of published models included."""
    overrides = [a for a in arguments if a not in ("--cfg", "job", "--resolve")]
    try:
        cfg = config.composed(overrides)
        config.with_pretrained(cfg, overrides)
        return config.to_yaml(cfg)
    except config.ConfigError as error:
        refuse([str(error)])


def configure(arguments: Sequence[str]) -> tuple[Config, torch.device]:
    """A configuration that can run, checked before any process group or GPU is taken."""
    try:
        cfg, problems = config.load(arguments)
        problems += validate(cfg, environment("train.py", *arguments))
        if not problems:
            check_run_dir(cfg.run_dir)
            check_resume(cfg.train.resume)
            check_data(cfg)
    except (config.ConfigError, DataError) as error:
        problems = [str(error)]
    if problems:
        refuse(problems)
    return cfg, pick_device()


def check_run_dir(run_dir: str) -> None:
    """Whether logs and checkpoints can be written."""
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config.ConfigError(f"run_dir={run_dir} cannot be written ({error.strerror}); choose another folder") from error


def check_resume(resume: str) -> None:
    """Whether the checkpoint that is named is one."""
    if resume not in ("auto", "never"):
        try:
            checkpoint.read_meta(checkpoint.find(Path(resume)) or Path(resume))
        except checkpoint.CheckpointError as error:
            raise config.ConfigError(f"train.resume={error}, or set it to auto or never") from error


def check_data(cfg: Config) -> None:
    """Open tokenizer and manifests, and compare the tokenizer with the model."""
    size, rows = load_tokenizer(cfg.data).vocab_size, cfg.model.decoder.vocab_size
    if size > rows:
        raise DataError(f"model.decoder.vocab_size={rows} is less than the {size} tokens of {cfg.data.tokenizer}; set it to {size} or more")
    stops(cfg, load_tokenizer(cfg.data))
    training_source(cfg.data, cfg.seed)
    for name in validation_names(cfg.data):
        validation_source(cfg.data, name)


def pick_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


@contextmanager
def reporting() -> Iterator[None]:
    """Turn the failures that a user can mend into one sentence, and leave no process waiting for this one."""
    try:
        yield
    except (DataError, RunError, checkpoint.CheckpointError) as error:
        reason = f"error: {error}" if world() == 1 else f"error on rank {rank()}: {error}"
        print(reason, file=sys.stderr, flush=True)
        tell_launcher(reason)
        os._exit(REFUSED)  # the other ranks may be in a collective: a clean shutdown would wait for them
    else:
        stop_processes()


def run(cfg: Config, device: torch.device) -> Outcome:
    """The whole run of a checked configuration."""
    start_processes(device)
    use_libraries(from_first_rank(libraries()))  # all ranks multiply alike
    mesh = make_mesh(cfg.parallel, device)
    run_dir = Path(cfg.run_dir)
    claim = claimed(run_dir, anew=cfg.train.resume == "never" or finished(cfg)) if mesh.rank == 0 else None
    if from_first_rank(mesh.rank == 0 and claim is None):
        raise RunError(f"run_dir={run_dir} belongs to a run that is still alive; wait for its end, or choose another folder")
    if mesh.rank == 0:
        print(banner(summary(cfg, mesh)), flush=True)
    wait_for_all()
    job = Run(cfg, mesh, load_tokenizer(cfg.data), lambda step: Telemetry(run_dir, mesh.rank, cfg.train.steps, step))
    try:
        return job.train()
    finally:
        job.telemetry.close()
        if claim is not None:
            claim.close()


def next_command(cfg: Config) -> str:
    """What a finished run is for: to transcribe, or as a language model for others."""
    listens = cfg.model.encoder is not None
    return f"python evaluate.py checkpoint={cfg.run_dir} audio=YOUR.wav" if listens else f"python -m model.hub convert {cfg.run_dir} OUT"


def finished(cfg: Config) -> bool:
    """Whether run_dir holds a run that has nothing left to do."""
    newest = checkpoint.newest(Path(cfg.run_dir))
    return cfg.train.resume == "auto" and newest is not None and checkpoint.step_of(newest) >= cfg.train.steps


def claimed(run_dir: Path, anew: bool) -> TextIO | None:
    """The lock on a run's folder, held until it is closed or the process ends; None if another process holds it.

    :param anew: what is there is set aside first
    """
    lock = (run_dir / "lock").open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not inherited by data workers, which may outlive a killed run
    except (BlockingIOError, PermissionError):
        lock.close()
        return None
    except OSError:
        pass  # a file system without locks
    if anew and set_aside(run_dir):
        lock.close()
        run_dir.mkdir()
        return claimed(run_dir, anew=False)
    return lock


def set_aside(run_dir: Path) -> bool:
    """Move an earlier run, if there is one, out of the way of one that starts anew."""
    if not (run_dir / "checkpoints").exists():
        return False
    number = next(n for n in range(1, 1_000_000) if not run_dir.with_name(f"{run_dir.name}.old{n}").exists())
    run_dir.rename(run_dir.with_name(f"{run_dir.name}.old{number}"))
    return True


def summary(cfg: Config, mesh: Mesh) -> RunSummary:
    """What this run is, in numbers."""
    spec = speech_lm.spec(cfg)
    leaves = [p for _, p in params.named_leaves(spec) if p.kind == "param"]
    total = params.count(spec)
    routed = sum(math.prod(p.shape) for p in leaves if "experts" in p.axes)
    decoder, row = cfg.model.decoder, cfg.data.rows[-1]
    rows_a_step = mesh.dp * cfg.train.accumulate
    return RunSummary(
        run_dir=Path(cfg.run_dir), device=mesh.device.type, precision=cfg.precision,
        mesh={axis: getattr(mesh.sizes, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
        layout=layout(mesh) | pipeline(cfg),
        parameters_total=total, parameters_trainable=sum(math.prod(p.shape) for p in leaves if p.trained),
        parameters_active=total - routed + routed * decoder.top_k // decoder.n_experts, adapters=adapters(cfg),
        tokens_per_step=row.tokens * rows_a_step, audio_sec_per_step=row.audio_frames * FRAME_SEC * rows_a_step,
        memory_bytes=memory(cfg, mesh), tensorboard_dir=Path(cfg.run_dir) / EVENTS_DIR,
        checkpoint_dir=Path(cfg.run_dir) / "checkpoints")


def layout(mesh: Mesh) -> dict[str, str]:
    """What is split, and over which ranks."""
    n, named = mesh.sizes, {}
    if n.dense[1] > 1:
        named["all parameters"] = f"{n.dense[1]} shards"
    if n.tp > 1:
        named["heads, hidden columns and vocabulary"] = f"tp {n.tp}, then {n.tensor[1]} shards"
    if n.ep > 1:
        named["experts"] = f"ep {n.ep}, then {n.ep_shard} shards"
    if n.cp > 1:
        named["slots of a row"] = f"cp {n.cp}"
    return named


def adapters(cfg: Config) -> str:
    """Which ranks updates have, how many, and by what they are multiplied; empty without LoRA."""
    given = cfg.model.lora
    if not given.rank:
        return ""
    ranks = Counter(lora.rank_of(path, given) for path in lora.targets(speech_lm.model_spec(cfg.model), given.targets))
    root = "√" if given.rslora else ""
    return ", ".join(f"{count} of rank {rank}, times {lora.scale(rank, given):.3g} (alpha {given.alpha:g} / {root}{rank})"
                     for rank, count in sorted(ranks.items()))


def pipeline(cfg: Config) -> dict[str, str]:
    """How the layers are cut into stages, and how long these wait for each other."""
    p, rows = cfg.parallel, cfg.train.accumulate
    if p.pp == 1:
        return {}
    more = 4 * p.pp * p.pp_chunks
    hint = f", {waiting(cfg, more):.0%} with train.accumulate={more}" if rows < more else ""
    sizes = ", ".join(str(len(stage.layers)) for stage in stages(cfg))
    return {"decoder layers": f"pp {p.pp} ({sizes}; {p.pp_schedule}, waiting {waiting(cfg, rows):.0%} of the time{hint})"}


def memory(cfg: Config, mesh: Mesh) -> dict[str, int]:
    """Bytes that a rank's device holds whatever its batch: its shards, and the whole weights in the compute dtype that exist at a time."""
    spec = own_spec(cfg, mesh.pp_rank)
    leaves = {path: p for path, p in params.named_leaves(spec) if p.kind == "param"}
    places = {path: sharding.place(p, mesh) for path, p in leaves.items()}
    numbers = {path: math.prod(sharding.local_shape(p, places[path])) for path, p in leaves.items()}
    shards = {path: number // places[path].mesh.size(1) for path, number in numbers.items()}
    held, trained = sum(shards.values()), sum(size for path, size in shards.items() if leaves[path].trained)
    units = (unit for stage in own_stages(cfg, mesh.pp_rank) for unit in speech_lm.units(cfg, stage))
    prefixes = [tuple(f"{path}." for path in unit) for unit in units]
    whole = [DTYPES[cfg.precision].itemsize * sum(n for path, n in numbers.items() if path.startswith(unit)) for unit in prefixes]
    kept = len(whole) if zero_stage(cfg.parallel.zero_stage) in (1, 2) else 2
    offload = offload_of(cfg)
    gathered = sum(sorted(whole)[-kept:]) if (mesh.sizes.sharded and mesh.world > 1) or offload == "parameters" else 0
    moments, gradients = 2 * moment_dtype(cfg).itemsize * trained, state_dtype(cfg).itemsize * trained
    held_bytes, moments, gradients = {
        "none": (master_dtype(cfg).itemsize * held, moments, gradients),
        "optimizer": (DTYPES[cfg.precision].itemsize * held, 0, gradients),  # the copies that compute
        "parameters": (0, 0, 0)}[offload]
    return {"parameters": held_bytes, "moments": moments, "gradients": gradients, "gathered layers": gathered}
