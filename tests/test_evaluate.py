"""evaluate.py: what is asked for wrongly ends with one sentence before anything starts; what is asked for rightly is scored and written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import evaluate
import train
from model import speech_lm
from parallel.mesh import make_mesh, start_processes
from parallel.validate import Environment
from training import checkpoint, config, launch
from training.config import to_dict
from training.state import init_state

ROOT = Path(__file__).parents[1]
SMALL = ["+experiment=digits", "compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*", "train.ctc_weight=0",
         "data.validation_utterances=3", "data.workers=0", "generation.max_new_tokens=5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learned nothing."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, f"run_dir={folder}"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    checkpoint.save(folder, init_state(speech_lm.spec(cfg), 0, mesh), {}, mesh, 2, to_dict(cfg))
    return folder


def command(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *launcher, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("arguments, pattern", [
    ([], r"checkpoint must be given: add checkpoint=runs/NAME"),
    (["checkpoint=/nowhere"], r"checkpoint=/nowhere does not exist; give a run's folder"),
    (["checkpoint=RUN/checkpoints"], r"checkpoint=.*/checkpoints holds no complete checkpoint: of checkpoints it has step_00000000 alone"),
    (["checkpoint=RUN", "manifest=/nowhere.jsonl"], r"/nowhere\.jsonl"),
    (["checkpoint=RUN", "audio=/nowhere.wav"], r"/nowhere\.wav cannot be read as audio \(there is no such file\)"),
    (["checkpoint=RUN", "set=dev"], r"data\.validation has no set 'dev' \(has: held_out\)"),
    (["checkpoint=RUN", "set=held_out", "audio=x.wav"], r"audio, manifest and set exclude each other"),
    (["checkpoint=RUN", "normalizer=french"], r"normalizer=french is unknown; choose one of none, basic, english"),
    (["checkpoint=RUN", "bleu_tokenizer=14a"], r"bleu_tokenizer=14a is unknown; choose one of none, zh, 13a"),
    (["checkpoint=RUN", "sett=dev"], r"Key 'sett' not in 'EvaluateConfig'; python evaluate.py --help lists the keys"),
    (["checkpoint=RUN", "top_p=0"], r"generation\.top_p=0\.0 is no share"),
    (["checkpoint=RUN", "max_new_tokens=0"], r"generation\.max_new_tokens=0 is too small"),
    (["checkpoint=RUN", "output=/nowhere/x.jsonl"], r"output=/nowhere/x\.jsonl is in no folder that exists"),
])
def test_one_sentence(run: Path, arguments: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate.prepare([argument.replace("RUN", str(run)) for argument in arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"error: .*{pattern}", err), err


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs evaluate.py here, with the process group of the tests; what its last line says of the first set."""
    monkeypatch.setattr(launch, "stop_processes", lambda: None)

    def result(*arguments: str) -> dict[str, Any]:
        evaluate.main(list(arguments))
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
        return found

    return result


def test_a_manifest_is_scored_and_written(run: Path, tmp_path: Path, evaluated: Callable[..., dict[str, Any]]) -> None:
    speech = ROOT / "data" / "speech"
    entries = [json.loads(line) for line in (speech / "manifest.jsonl").read_text().splitlines()[:3]]
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("".join(json.dumps(e | {"audio_filepath": str(speech / e["audio_filepath"]), "id": str(i)}) + "\n"
                                for i, e in enumerate(entries)))
    result = evaluated(f"checkpoint={run}", f"manifest={manifest}", "normalizer=english", f"output={tmp_path / 'out.jsonl'}")
    assert (result["set"], result["utterances"]) == ("m", 3)
    assert {"wer", "cer", "bleu", "words", "substitutions", "deletions", "insertions", "audio_sec", "rtfx"} <= result.keys()
    assert result["rtfx"] > 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    assert [row["reference"] for row in rows] == [e["text"] for e in entries]
    assert sum(row["words"] for row in rows) == result["words"]
    assert result["audio_sec"] == pytest.approx(sum(e["duration"] for e in entries), abs=0.1)


def test_one_file_of_any_length(run: Path, tmp_path: Path, evaluated: Callable[..., dict[str, Any]]) -> None:
    path = tmp_path / "long.wav"
    soundfile.write(path, np.random.default_rng(0).standard_normal(16000 * 40).astype(np.float32) * 0.1, 16000)
    printed = evaluated(f"checkpoint={run}", f"audio={path}", "temperature=1")
    assert printed["audio"] == str(path)
    assert printed["text"] == evaluated(f"checkpoint={run}", f"audio={path}", "temperature=1")["text"]
    assert len(printed["text"]) > 3 * 5  # at least four pieces of five characters


@pytest.mark.parametrize(("world", "stages", "experts"), [(1, 1, 1), (2, 1, 2), (3, 1, 1), (4, 2, 2), (8, 2, 2)])
def test_a_run_is_evaluated_on_any_number_of_processes(run: Path, world: int, stages: int, experts: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and the split of experts stay where there are processes for them."""
    cfg, _ = config.load([*SMALL, "parallel.pp=2", "parallel.pp_layers=[1,1]", "model.decoder.pattern=ME", "parallel.ep=2"])
    monkeypatch.setattr(evaluate.launch, "world", lambda: world)
    found = evaluate.configure(evaluate.EvaluateConfig(checkpoint=str(run)), to_dict(cfg), []).parallel
    assert (found.pp, found.ep) == (stages, experts)


def test_what_a_run_had_of_a_gpu_is_not_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could leave it out: it stands in the checkpoint."""
    cfg, _ = config.load([*SMALL, "model.decoder.pattern=ME", "parallel.ep=2", "parallel.ep_dispatch=deepep", "precision=bf16",
                          "compile.cuda_graph=true"])
    monkeypatch.setattr(evaluate.launch, "world", lambda: 2)
    monkeypatch.setattr(evaluate.launch, "environment", lambda *command: Environment(2, gpu=False))
    found = evaluate.configure(evaluate.EvaluateConfig(checkpoint=str(run)), to_dict(cfg), [])
    assert (found.parallel.ep, found.parallel.ep_dispatch) == (2, "alltoall")


def test_a_refusal_is_the_last_that_torchrun_says(tmp_path: Path) -> None:
    done = command("train.py", "+experiment=digits", "train.steps=0", f"run_dir={tmp_path}",
                   launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    assert done.returncode != 0
    assert "error: train.steps=0 is too small; it must be at least 1" in "\n".join(done.stderr.splitlines()[-4:])


def test_help_lists_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--help"])
    told = capsys.readouterr().out
    assert re.search(r"\n\+experiment=\.\.\.\n.*?\n    digits +Spoken number strings", told, re.DOTALL)
    keys = {line.split(":")[0].strip() for line in told.splitlines() if line.startswith("    ") and ": " in line}
    assert {"optimizer.lr", "model.decoder.pattern", "model.lora.rank", "generation.top_p", "run_dir"} <= keys
    evaluate.main(["-h"])
    told = capsys.readouterr().out
    assert "    checkpoint: str, must be given  a run's folder" in told
    assert "    normalizer: str, \"none\"  none | basic | english" in told


def test_sets_have_files_of_their_own() -> None:
    names = {evaluate.beside(Path("runs/x/step_2"), name) for name in ("dev", "dev.clean", "dev.other", "a/dev")}
    assert len(names) == 4
    assert {name.parent for name in names} == {Path("runs/x")}
