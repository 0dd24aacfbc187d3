"""Transcribe and score with a trained checkpoint, on one process or under torchrun.

    python evaluate.py checkpoint=runs/digits audio=x.wav          # one file
    python evaluate.py checkpoint=runs/digits manifest=test.jsonl  # a manifest with transcripts: WER and a JSONL of hypotheses
    python evaluate.py checkpoint=runs/digits                      # the run's own validation sets
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config, EvaluateConfig
from data.errors import DataError
from data.loader import decoding_batches, file_batch
from data.sources import validation_names
from data.tokenizer import load_tokenizer
from model import speech_lm
from parallel.mesh import Mesh, make_mesh, start_processes
from parallel.validate import Environment, validate
from training import checkpoint, config, launch
from training.evaluation import Transcript, transcribe, word_error_rate
from training.state import init_state
from training.step import make_engine, state_dtype


def options(arguments: list[str]) -> EvaluateConfig:
    """The typed command line."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvaluateConfig), OmegaConf.from_dotlist(arguments))
        result: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise config.ConfigError(f"{str(error).splitlines()[0]}; the keys are in configs/schema.py: EvaluateConfig") from error
    if sum(x is not None for x in (result.audio, result.manifest, result.set)) > 1:
        raise config.ConfigError("audio, manifest and set exclude each other; give one of them, or none for the run's validation sets")
    return result


def find(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `path` names, and its meta.json."""
    chosen = path if (path / "meta.json").exists() else (checkpoint.best(path) or (checkpoint.newest(path), 0.0))[0]
    if chosen is None or not (chosen / "meta.json").exists():
        raise config.ConfigError(f"checkpoint={path} holds no complete checkpoint; give a run's folder or one of its checkpoints/step_*")
    return chosen, json.loads((chosen / "meta.json").read_text())


def work(cfg: Config, asked: EvaluateConfig, mesh: Mesh) -> Iterable[tuple[str, Iterable[dict[str, Any]]]]:
    """Name and rows of each thing to transcribe."""
    room = cfg.train.max_new_tokens
    if asked.audio is not None:
        yield asked.audio, [file_batch(cfg.data, asked.audio, room)]
    else:
        for name in [asked.set] if asked.set else validation_names(cfg.data):
            yield name, decoding_batches(cfg.data, name, mesh.dp_rank, mesh.dp, room)


def configure(asked: EvaluateConfig, stored: dict[str, Any], command: list[str]) -> Config:
    """The run's configuration with this command's data; it may use another number of processes than the training."""
    cfg = config.from_dict(stored)
    cfg.train.max_new_tokens = asked.max_new_tokens or cfg.train.max_new_tokens
    if asked.manifest is not None:
        cfg.data = replace(cfg.data, kind="manifest", validation={Path(asked.manifest).stem: asked.manifest})
    problems = validate(cfg, Environment(launch.world(), " ".join(["evaluate.py", *command])))
    if problems:
        launch.refuse(problems)
    return cfg


def report(found: list[Transcript], name: str, single: bool, output: Path) -> dict[str, Any]:
    """Write the hypotheses and print what a person wants to see; returns the figures."""
    if single:
        print(found[0].hypothesis)
        return {"audio": name, "text": found[0].hypothesis}
    with output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(t), ensure_ascii=False) + "\n" for t in found)
    figures = word_error_rate(found)
    print(f"{name}: WER {figures['wer']:.4f} on {figures['words']} words of {len(found)} utterances; hypotheses in {output}")
    return {"set": name, "utterances": len(found), **figures}


def main(arguments: list[str]) -> None:
    """Everything, from the command line to the last line, one JSON object."""
    try:
        asked = options(arguments)
        path, meta = find(Path(asked.checkpoint))
        cfg = configure(asked, meta["config"], arguments)
        tokenizer = load_tokenizer(cfg.data)
    except (config.ConfigError, DataError) as error:
        launch.refuse([str(error)])
    device = launch.pick_device()
    with launch.reporting():
        start_processes(device)
        mesh = make_mesh(cfg.parallel, device)
        state, _ = checkpoint.load(path, init_state(speech_lm.spec(cfg), cfg.seed, mesh, state_dtype(cfg)), mesh)
        engine, results = make_engine(cfg, mesh), []
        for name, batches in work(cfg, asked, mesh):
            found = transcribe(cfg, mesh, engine, state, batches, tokenizer)
            if mesh.rank == 0:
                output = Path(asked.output) if asked.output else path.with_name(f"{path.name}.{Path(name).stem}.jsonl")
                results.append(report(found, name, asked.audio is not None, output))
        if mesh.rank == 0:
            print(json.dumps({"checkpoint": str(path), "results": results}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
