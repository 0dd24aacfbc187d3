"""What cannot run is refused before any process group exists: exit status 2 and one sentence that names the place and the way out."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from model import params, speech_lm
from parallel.mesh import make_mesh, start_processes
from tests.model.hub.test_rows import written
from training import config, launch


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that `train.py arguments` refuses with."""
    with pytest.raises(SystemExit) as end:
        launch.configure(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def manifest(folder: Path, *lines: str) -> str:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(("arguments", "pattern"), [
    (["train.stepz=3"], r"Key 'stepz' not in 'TrainConfig' at train.stepz in train.stepz=3; every key .* configs/schema.py"),
    (["train.steps=abc"], r"Value 'abc' of type 'str' could not be converted to Integer at train.steps"),
    (["+experiment=nope"], r"Could not find 'experiment/nope' in \+experiment=nope; there are .*digits, digits_ep2, .*nemotron_ep8"),
    (["model=nope"], r"Could not find 'model/nope' in model=nope; there are .*digits, .*nemotron3_nano, nemotron3_tiny"),
    (["experiment=digits"], r"write \+experiment=..., with a plus, in experiment=digits$"),
    (["+train.stepss=3"], r"unknown key train.stepss in \+train.stepss=3"),
    (["+parallel.zz=2"], r"unknown key parallel.zz in"),
    (["parallel.pp_microbatch_size=4"], r"parallel.pp_microbatch_size is no key here: what travels is a packed row, .*; leave it out$"),
    (["parallel.pipeline.scale_grads_in_schedule=false"], r"scale_grads_in_schedule is no key here: the loss is .*; leave it out$"),
    (["parallel.tp_size=2"], r"parallel.tp_size is no key here: set parallel.tp; leave it out$"),
    (["+parallel.output_dtype=bf16"], r"parallel.output_dtype is no key here: layers give what precision says, .*; leave it out$"),
    (["run_dir=/proc/nowhere"], r"run_dir=/proc/nowhere cannot be written \(.*\); choose another folder"),
    (["train.resume=/nowhere"], r"train.resume=/nowhere does not exist; give a run's folder or one of its checkpoints/step_\*, or set"),
    (["run_dir=a=b"], r"the command line run_dir=a=b cannot be read: .*quote a value"),
    (["+experiment=digits_ep2"], r"parallel.ep=2 needs .* type torchrun --nproc_per_node=2 train.py \+experiment=digits_ep2$"),
    (["+experiment=nemotron_ep8", "data=digits", "model=nemotron3_tiny"],
     r"type torchrun --nproc_per_node=8 train.py \+experiment=nemotron_ep8 data=digits model=nemotron3_tiny$"),
    (["model.decoder.n_experts=7", "parallel.ep=1", "model.decoder.top_k=9"], r"model.decoder.top_k=9 is more than the 7 experts"),
    (["data.tokenizer=/nowhere/tokenizer.json"], r"data.tokenizer: there is no file /nowhere/tokenizer.json"),
    (["model.decoder.vocab_size=10"], r"model.decoder.vocab_size=10 is less than the \d+ tokens of data/speech/tokenizer.json"),
    (["data=manifest", "data.tokenizer=data/speech/tokenizer.json", "data.manifest=/nowhere.jsonl"], r"/nowhere.jsonl"),
    (["data.max_words=30"], r"data.max_words=30 words can exceed the largest row"),
])
def test_one_sentence(arguments: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refusal(arguments, capsys)
    assert line.startswith("error: ")
    assert re.search(pattern, line), line
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_missing_keys_and_the_number_of_processes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refusal(["+experiment=nemotron_ep8"], capsys)
    assert [line.split(" must be given")[0] for line in lines[:2]] == ["error: data.manifest", "error: data.tokenizer"]
    assert lines[2].endswith("type torchrun --nproc_per_node=8 train.py +experiment=nemotron_ep8")
    assert len(lines) == 3


@pytest.mark.parametrize(("lines", "pattern"), [
    (['{"audio_filename": "a.wav", "duration": 1.0, "text": "x"}'], r"line 1 of .*train.jsonl.*audio_filepath"),
    (['{"audio_filepath": "a.wav", "duration": 1.0, "text": "x"}', "not json"], r"line 2 of .*train.jsonl"),
    ([json.dumps({"audio_filepath": "a.wav", "duration": 1.0, "text": "  "})], r"line 1 of .*train.jsonl: text is empty"),
    ([], r"train.jsonl"),
])
def test_manifests_are_read_before_the_start(lines: list[str], pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refusal(["data=manifest", "data.tokenizer=data/speech/tokenizer.json", f"data.manifest={manifest(tmp_path, *lines)}"], capsys)
    assert re.search(pattern, line), line


def test_a_nested_experiment_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would put its values under the key experiment, where nobody reads them."""
    for source in config.CONFIG_DIR.rglob("*.yaml"):
        target = tmp_path / source.relative_to(config.CONFIG_DIR)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text())
    (tmp_path / "experiment" / "mine.yaml").write_text("train:\n  steps: 5\n")
    monkeypatch.setattr(config, "CONFIG_DIR", tmp_path)
    with pytest.raises(config.ConfigError, match="put '# @package _global_' into its first line"):
        config.load(["+experiment=mine"])


def test_a_key_inside_of_nothing_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="names a key inside what another sets to null; leave one of the two out"):
        config.load(["+experiment=digits", "model.encoder=null", "model.encoder.d_model=16"])


def test_shown_configuration_is_the_resolved_one() -> None:
    shown = launch.show(["+experiment=nemotron_ep8", "--cfg", "job", "train.steps=7"])
    assert re.search(r"^parallel:\n(  .*\n)*  ep: 8$", shown, re.MULTILINE)
    assert re.search(r"^  steps: 7$", shown, re.MULTILINE)
    assert "manifest: ???" in shown


def test_published_size_of_nemotron() -> None:
    """31.6 B parameters in all, 3.6 B active with the embedding (NVIDIA's model card of Nemotron 3 Nano); plus the encoder's."""
    from model import decoder, fastconformer, params

    cfg, _ = config.load(["+experiment=nemotron_ep8"])
    assert params.count(decoder.spec(cfg.model.decoder)) == 31_577_937_344
    assert cfg.model.encoder is not None
    assert params.count(fastconformer.spec(cfg.model.encoder)) == 810_984_448


@pytest.mark.parametrize(("resume", "steps", "expected"), [("auto", 20, True), ("auto", 21, False), ("never", 20, False)])
def test_a_run_with_nothing_left_is_finished(tmp_path: Path, resume: str, steps: int, expected: bool) -> None:
    cfg, _ = config.load([f"run_dir={tmp_path}", f"train.steps={steps}", f"train.resume={resume}"])
    assert launch.finished(cfg) is False
    for step in (9, 20):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text("{}")
    assert launch.finished(cfg) is expected


def test_a_folder_belongs_to_one_living_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    first = launch.claimed(run_dir, anew=True)
    assert first is not None
    assert (tmp_path / "run.old1" / "checkpoints").exists()
    (run_dir / "checkpoints").mkdir()
    with ProcessPoolExecutor(1, get_context("fork")) as another:
        def finds(anew: bool) -> bool:
            return another.submit(_claims, run_dir, anew).result()

        assert not finds(anew=True)
        assert (run_dir / "checkpoints").exists()
        first.close()
        assert finds(anew=False)


def _claims(run_dir: Path, anew: bool) -> bool:
    lock = launch.claimed(run_dir, anew)
    if lock is not None:
        lock.close()
    return lock is not None


def test_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        launch.set_aside(tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.old1", "run.old2"]
    launch.set_aside(tmp_path / "run")


def test_memory_counts_a_tied_table_once_and_nothing_for_the_learning_of_frozen_parameters() -> None:
    cfg, _ = config.load(["+experiment=digits", "model.decoder.tie_embeddings=true", "model.freeze_params=['encoder']", "precision=fp32",
                          "model.encoder.freeze_batch_norm=true"])
    start_processes(torch.device("cpu"))
    spec = speech_lm.spec(cfg)
    frozen = params.count(spec["encoder"])
    total = params.count(spec)
    found = launch.memory(cfg, make_mesh(cfg.parallel, torch.device("cpu")))
    assert found == {"parameters": 4 * total, "moments": 8 * (total - frozen), "gradients": 4 * (total - frozen), "gathered layers": 0}
    assert frozen > 0
    cfg.precision, cfg.parallel.offload = "bf16", "offload_optimizer"
    found = launch.memory(cfg, make_mesh(cfg.parallel, torch.device("cpu")))
    assert found == {"parameters": 2 * total, "moments": 0, "gradients": 4 * (total - frozen), "gathered layers": 0}
    cfg.parallel.offload = "offload_param"
    found = launch.memory(cfg, make_mesh(cfg.parallel, torch.device("cpu")))
    largest = 2 * params.count({name: spec["decoder"][name] for name in ("embedding",)})
    assert (found["parameters"], found["moments"], found["gradients"]) == (0, 0, 0)
    assert largest < found["gathered layers"] < 2 * total


def test_the_banner_says_how_the_stages_wait_and_what_would_help() -> None:
    cfg, _ = config.load(["+experiment=digits", "parallel.pp=2", "parallel.pp_layers=[1,3]", "model.decoder.pattern=M*--"])
    (text,) = launch.pipeline(cfg).values()
    assert re.fullmatch(r"pp 2 \(1, 3; 1f1b, waiting [5-9]\d% of the time, [1-6]\d% with train.accumulate=8\)", text)
    cfg.train.accumulate = 8
    (text,) = launch.pipeline(cfg).values()
    assert "with" not in text
    cfg.parallel.pp = 1
    assert launch.pipeline(cfg) == {}


def test_the_banner_says_by_what_updates_are_multiplied() -> None:
    keys = ["+experiment=digits", "model.decoder.pattern=M*-"]
    assert launch.adapters(config.load(keys)[0]) == ""
    keys += ["model.lora.rank=64", r"model.lora.targets=['decoder\.layers\.1\.[qkv]\.','decoder\.layers\.2\.']"]
    assert launch.adapters(config.load(keys)[0]) == "5 of rank 64, times 0.25 (alpha 16 / 64)"
    cfg, _ = config.load([*keys, "model.lora.alpha=10", "model.lora.rslora=true"])
    cfg.model.lora.ranks = {r"decoder\.layers\.1\.q": 4}
    assert launch.adapters(cfg) == "1 of rank 4, times 5 (alpha 10 / √4), 4 of rank 64, times 1.25 (alpha 10 / √64)"


def test_shown_configuration_has_the_sizes_of_a_published_folder(tmp_path: Path) -> None:
    written("qwen3", tmp_path)
    shown = launch.show(["+experiment=canary_qwen_lora", f"model.pretrained={tmp_path}", "--cfg", "job", "model.decoder.init_std=0.5"])
    assert "    pattern: '*-W-'\n    d_model: 12\n" in shown
    assert "    init_std: 0.5\n" in shown


def test_a_run_ends_with_what_can_be_done_with_it() -> None:
    cfg, _ = config.load(["+experiment=digits"])
    assert launch.next_command(cfg) == "python evaluate.py checkpoint=runs/digits audio=YOUR.wav"
    cfg.model.encoder = None
    assert launch.next_command(cfg) == "python -m model.hub convert runs/digits OUT"
