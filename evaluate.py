"""Transcribe and score with a trained checkpoint, on one process or under torchrun.

    python evaluate.py checkpoint=runs/digits audio=x.wav          # one file, of any length
    python evaluate.py checkpoint=runs/digits manifest=test.jsonl  # a manifest with transcripts: scores, and a JSONL of hypotheses
    python evaluate.py checkpoint=runs/digits                      # the run's own validation sets
"""

import functools
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from sacrebleu.metrics.bleu import BLEU

from configs.schema import Config, EvaluateConfig
from data.audio import whole_file
from data.errors import DataError
from data.loader import decoding_batches, file_batches
from data.sources import validation_names, validation_source
from data.tokenizer import Tokenizer, load_tokenizer
from model import freezing
from model.stages import own_spec
from parallel import deepep
from parallel.mesh import Mesh, make_mesh, start_processes
from parallel.validate import validate
from training import checkpoint, config, launch, manual
from training.evaluation import stops, transcribe
from training.generation import Weights
from training.rows import read_once
from training.scoring import NORMALIZERS, Transcript, lines, scores
from training.state import init_state
from training.step import make_engine, state_dtype

GENERATION = ("max_new_tokens", "temperature", "top_p")  # keys of the run that the command line may replace


def options(arguments: list[str]) -> EvaluateConfig:
    """The typed command line."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvaluateConfig), OmegaConf.from_dotlist(arguments))
        if OmegaConf.is_missing(merged, "checkpoint"):
            raise config.ConfigError("checkpoint must be given: add checkpoint=runs/NAME to the command, the folder of a run")
        result: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise config.ConfigError(f"{str(error).splitlines()[0]}; python evaluate.py --help lists the keys") from error
    if sum(x is not None for x in (result.audio, result.manifest, result.set)) > 1:
        raise config.ConfigError("audio, manifest and set exclude each other; give one of them, or none for the run's validation sets")
    if result.normalizer not in NORMALIZERS:
        raise config.ConfigError(f"normalizer={result.normalizer} is unknown; choose one of {', '.join(NORMALIZERS)}")
    if result.bleu_tokenizer not in BLEU.TOKENIZERS:
        raise config.ConfigError(f"bleu_tokenizer={result.bleu_tokenizer} is unknown; choose one of {', '.join(BLEU.TOKENIZERS)}")
    return result


def find(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `path` names, and its meta.json."""
    best = checkpoint.best(path)
    chosen = (best[0] if best else checkpoint.find(path)) or path
    try:
        return chosen, checkpoint.read_meta(chosen)
    except checkpoint.CheckpointError as error:
        raise config.ConfigError(f"checkpoint={error}") from error


def configure(asked: EvaluateConfig, stored: dict[str, Any], command: list[str]) -> Config:
    """The run's configuration with this command's data, checked; it may use another number of processes than the training."""
    cfg = config.from_dict(stored)
    if cfg.model.encoder is None:
        raise config.ConfigError(f"checkpoint={asked.checkpoint} is of a language model alone, which transcribes nothing; give one that "
                                 "was trained with an encoder")
    cfg.parallel = replace(cfg.parallel, dp_replicate=1, cp=1, tp=1)  # copies serve gradients; decoding splits requests, not rows
    if launch.world() % (cfg.parallel.pp * cfg.parallel.ep):
        cfg.parallel = replace(cfg.parallel, pp=1, pp_chunks=1, pp_layers=[], ep=math.gcd(launch.world(), cfg.parallel.ep))
    if cfg.parallel.ep_dispatch == "deepep" and not deepep.available():
        cfg.parallel = replace(cfg.parallel, ep_dispatch="alltoall")
    cfg.compile = replace(cfg.compile, cuda_graph=False)  # of training steps
    asked_for = {key: getattr(asked, key) for key in GENERATION if getattr(asked, key) is not None}
    cfg.generation = replace(cfg.generation, **asked_for)
    if asked.manifest is not None:
        cfg.data = replace(cfg.data, kind="manifest", validation={Path(asked.manifest).stem: asked.manifest})
    problems = validate(cfg, launch.environment("evaluate.py", *command))
    if problems:
        launch.refuse(problems)
    if asked.audio is not None:
        whole_file(asked.audio)
    names = sets(cfg, asked)
    if asked.output is not None and len(names) > 1:
        raise config.ConfigError(f"output={asked.output} is one file for the sets {', '.join(names)}; choose one with set=, or leave out "
                                 "output")
    for name in names:
        validation_source(cfg.data, name)
    return cfg


def sets(cfg: Config, asked: EvaluateConfig) -> list[str]:
    """Names of the sets to transcribe; none for a file."""
    if asked.audio is not None:
        return []
    return [asked.set] if asked.set is not None else validation_names(cfg.data)


def work(cfg: Config, asked: EvaluateConfig, mesh: Mesh) -> Iterable[tuple[str, Iterable[dict[str, Any]]]]:
    """Name and rows of each thing to transcribe."""
    if asked.audio is not None:
        yield asked.audio, read_once(functools.partial(file_batches, cfg.data, asked.audio), mesh)
    for name in sets(cfg, asked):
        yield name, read_once(functools.partial(decoding_batches, cfg.data, name), mesh)


def beside(checkpoint: Path, name: str) -> Path:
    """Where the hypotheses of a set go unless `output` says it."""
    return checkpoint.with_name(f"{checkpoint.name}.{name.replace('/', '_')}.jsonl")


def report(found: list[Transcript], name: str, asked: EvaluateConfig, output: Path, seconds: float) -> dict[str, Any]:
    """Write the hypotheses and print what a person wants to see; returns the figures."""
    if asked.audio is not None:
        print(found[0].hypothesis)
        return {"audio": name, "text": found[0].hypothesis}
    with output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines(found, asked.normalizer))
    figures = scores(found, asked.normalizer, asked.bleu_tokenizer)
    audio_sec = sum(t.audio_sec for t in found)
    figures |= {"audio_sec": round(audio_sec, 1), "rtfx": round(audio_sec / seconds, 1)}
    errors = ", ".join(f"{figures[kind]} {kind}" for kind in ("substitutions", "deletions", "insertions"))
    print(f"{name}: WER {figures['wer']:.4f} on {figures['words']} words of {len(found)} utterances ({errors}), CER {figures['cer']:.4f}, "
          f"BLEU {figures['bleu']:.1f}, {figures['rtfx']:.1f} times real time; hypotheses in {output}")
    return {"set": name, "utterances": len(found), **figures}


def prepare(arguments: list[str]) -> tuple[EvaluateConfig, Path, Config, Tokenizer]:
    """All that can be known before any process group or GPU is taken; a fault ends the program with one sentence."""
    try:
        asked = options(arguments)
        path, meta = find(Path(asked.checkpoint))
        cfg = configure(asked, meta["config"], arguments)
        tokenizer = load_tokenizer(cfg.data)
        stops(cfg, tokenizer)
        if asked.output is not None and not Path(asked.output).parent.is_dir():
            raise config.ConfigError(f"output={asked.output} is in no folder that exists; make it, or choose another place")
    except (config.ConfigError, DataError) as error:
        launch.refuse([str(error)])
    return asked, path, cfg, tokenizer


def main(arguments: list[str]) -> None:
    """Everything, from the command line to the last line, one JSON object."""
    if {"-h", "--help"} & set(arguments):
        print(manual.evaluate(__doc__ or ""))
        return
    asked, path, cfg, tokenizer = prepare(arguments)
    device = launch.pick_device()
    with launch.reporting():
        start_processes(device)
        mesh, results = make_mesh(cfg.parallel, device), []
        spec = freezing.freeze(own_spec(cfg, mesh.pp_rank), [""], [])  # no moments
        state, _ = checkpoint.load(path, init_state(spec, cfg.seed, mesh, state_dtype(cfg)), mesh)
        weights = Weights(cfg, mesh, make_engine(cfg, mesh), state.leaves())
        for name, batches in work(cfg, asked, mesh):
            started = time.perf_counter()
            found = transcribe(weights, batches, tokenizer)
            if mesh.rank == 0:
                output = Path(asked.output) if asked.output else beside(path, name)
                results.append(report(found, name, asked, output, time.perf_counter() - started))
        if mesh.rank == 0:
            print(json.dumps({"checkpoint": str(path), "results": results}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
