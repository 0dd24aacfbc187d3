"""A run that starts from published folders: their sizes, their tensors, and back into a folder that they can be compared with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizer import load_tokenizer
from model import speech_lm
from model.hub.__main__ import run
from model.hub.family import HubError
from parallel.mesh import make_mesh, start_processes
from tests.dist.first_worker import rows
from tests.goldens import perception
from tests.model.hub.test_nemo import archive
from tests.model.hub.test_rows import written
from training import checkpoint, config, loop
from training.config import ConfigError
from training.state import State, init_state
from training.step import make_engine, make_step

ROW = "{tokens: 256, audio_frames: 176, utterances: 6, utterance_frames: 32, label_tokens: 16}"
SMALL = ["+experiment=digits", "compile.enabled=false", f"data.rows=[{ROW}]", "train.ctc_weight=0", "model.decoder.bias_update_rate=0.01"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A language model with room for the demo's tokens, and a recogniser."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    vocab = load_tokenizer(config.load(["+experiment=digits"])[0].data).vocab_size
    written("qwen3_moe", folder, vocab_size=vocab, router_bias=False)
    return folder, archive(folder)


def test_sizes_come_from_the_folders_and_the_command_line_goes_over_them(folders: tuple[Path, Path]) -> None:
    llm, nemo = folders
    overrides = [*SMALL[:-1], f"model.pretrained={llm}", f"model.pretrained_encoder={nemo}", "model.decoder.rope_theta=7.0"]
    cfg, missing = config.load(overrides)
    assert missing == []
    assert cfg.model.encoder == perception.ENCODER
    assert (cfg.model.decoder.pattern, cfg.model.decoder.d_model, cfg.model.decoder.rope_theta) == ("*E*-", 12, 7.0)
    assert cfg.model.decoder.activation == "swiglu"
    assert config.from_dict(config.to_dict(cfg)) == cfg


def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^model.pretrained={tmp_path}: .* holds neither config.json nor"):
        config.load([*SMALL, f"model.pretrained={tmp_path}"])


def test_a_run_starts_from_the_tensors_trains_and_goes_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    llm, nemo = folders
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL[:-1], f"model.pretrained={llm}", f"model.pretrained_encoder={nemo}", f"run_dir={tmp_path / 'run'}",
                          "optimizer.lr=0.005", "optimizer.warmup_steps=1"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    known, notes = loop.pretrained(cfg, mesh)
    assert f"starting from {llm}: Qwen 3 with experts, 24 tensors" in notes
    assert any(note.endswith("only the encoder of a recogniser is taken") for note in notes)
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh, known=known)
    fresh = init_state(speech_lm.spec(cfg), cfg.seed, mesh)
    new = {name for name in state.params if torch.equal(state.params[name].full_tensor(), fresh.params[name].full_tensor())}
    assert {"projector.weight", "projector.bias"} <= new
    assert not {name for name in new if ".weight" in name or "experts" in name} - {"projector.weight"}
    checkpoint.save(tmp_path / "run", state, None, mesh, 1, config.to_dict(cfg))
    before = run(["convert", str(tmp_path / "run"), str(tmp_path / "same")])
    assert before["family"] == "qwen3_moe"
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (llm / "model.safetensors").read_bytes()
    losses, after = _train(cfg, mesh, state, 5)
    assert losses[-1] < losses[0]
    checkpoint.save(tmp_path / "run", after, None, mesh, 1, config.to_dict(cfg))
    run(["convert", str(tmp_path / "run"), str(tmp_path / "trained")])
    found = run(["verify", str(tmp_path / "trained"), str(llm)])
    assert (found["not_finite"], found["different"]) == (0, found["tensors"])


def _train(cfg: Any, mesh: Any, state: State, steps: int) -> tuple[list[float], State]:
    step, losses = make_step(cfg, mesh, make_engine(cfg, mesh)), []
    for _ in range(steps):
        state, metrics = step(state, rows(cfg, 0))
        losses.append(metrics["loss"].item())
    return losses, state


@pytest.mark.parametrize("changes", [
    ["model.lora.rank=3", "model.lora.rslora=true", r"model.lora.targets=['decoder\.layers\.[02]\.[qv]','.*experts\.up']"],
    ["model.lora.rank=3", "model.lora.dora=true", r"model.lora.targets=['decoder\.layers\.0\.o','.*3\.up$']"],
], ids=["experts", "dora"])
def test_an_adapter_leaves_a_run_and_starts_another(folders: tuple[Path, Path], tmp_path: Path, changes: list[str],
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = folders
    start_processes(torch.device("cpu"))
    mesh = make_mesh(config.load(SMALL)[0].parallel, torch.device("cpu"))
    start = [*SMALL[:-1], f"model.pretrained={llm}"]
    cfg, _ = config.load([*start, *changes, f"run_dir={tmp_path / 'run'}", "model.lora.alpha=5"])
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh, known=loop.pretrained(cfg, mesh)[0])
    adapters = {name: w for name, w in state.params.items() if "_lora." in name}
    for w in adapters.values():
        w.to_local().normal_(std=0.3)
    checkpoint.save(tmp_path / "run", state, None, mesh, 1, config.to_dict(cfg))
    said = run(["adapter", str(tmp_path / "run"), str(tmp_path / "adapter")])
    assert said["projections"] == sum(n.endswith(".a") for n in adapters)
    others = {part: sum(w.numel() for name, w in state.first.items() if name.startswith(f"{part}.") and name not in adapters)
              for part in ("encoder", "projector", "decoder")}
    assert said["trained_besides"] == others
    assert (f"encoder ({others['encoder']:,} parameters), projector ({others['projector']:,} parameters), decoder "
            f"({others['decoder']:,} parameters); python -m model.hub convert {tmp_path / 'run'} OUT --family salm/qwen3_moe writes the "
            "whole model") in capsys.readouterr().out
    again, _ = config.load([*start, f"model.lora.start={tmp_path / 'adapter'}", "model.lora.dropout=0.5"])
    assert (again.model.lora.rank, again.model.lora.alpha, again.model.lora.dropout) == (3, 5, 0.5)
    assert (again.model.lora.rslora, again.model.lora.dora) == (cfg.model.lora.rslora, cfg.model.lora.dora)
    again.model.lora.dropout = 0
    known, notes = loop.pretrained(again, mesh)
    assert notes[-1] == f"starting from the adapter {tmp_path / 'adapter'}: {len(adapters)} tensors"
    restarted = init_state(speech_lm.spec(again), 1, mesh, known=known)
    assert {name for name in restarted.params if "_lora." in name} == set(adapters)
    for name, w in adapters.items():
        torch.testing.assert_close(restarted.params[name].full_tensor(), w.full_tensor(), rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_that_cannot_start_or_leave_a_run_are_one_sentence(folders: tuple[Path, Path], tmp_path: Path) -> None:
    llm, _ = folders
    with pytest.raises(ConfigError, match=r"^model.lora.start=/nowhere needs the model .*; give its folder as model.pretrained"):
        config.load([*SMALL[:-1], "model.lora.start=/nowhere"])
    with pytest.raises(ConfigError, match=r"^model.lora.start=/nowhere: /nowhere does not exist; give a folder that peft"):
        config.load([*SMALL[:-1], f"model.pretrained={llm}", "model.lora.start=/nowhere"])
    start_processes(torch.device("cpu"))
    mesh = make_mesh(config.load(SMALL)[0].parallel, torch.device("cpu"))
    for changes, message in ((["model.lora.rank=0"], "has no adapters"), (["model.lora.rank=2", "model.lora.targets=['encoder','decoder']"],
                                                                         r"also adapts encoder\..*, which is no part of Qwen 3")):
        cfg, _ = config.load([*SMALL[:-1], f"model.pretrained={llm}", *changes])
        state = init_state(speech_lm.spec(cfg), cfg.seed, mesh)
        path = checkpoint.save(tmp_path, state, None, mesh, 1, config.to_dict(cfg))
        with pytest.raises(HubError, match=message):
            run(["adapter", str(path), str(tmp_path / "out")])
    with pytest.raises(HubError, match="holds no complete checkpoint: it lacks checkpoints"):
        run(["adapter", str(llm), str(tmp_path / "out")])


def test_overrides_with_a_plus_go_over_the_folder_too(folders: tuple[Path, Path]) -> None:
    llm, _ = folders
    cfg, _ = config.load([*SMALL[:-1], f"model.pretrained={llm}", "++model.decoder.rope_theta=7.0", "model.lora.rank=2",
                          r"+model.lora.ranks={decoder: 3}"])
    assert (cfg.model.decoder.pattern, cfg.model.decoder.rope_theta, cfg.model.lora.ranks) == ("*E*-", 7.0, {"decoder": 3})
    with pytest.raises(ConfigError, match=r"unknown key model\.decoder\.x"):
        config.load([*SMALL[:-1], f"model.pretrained={llm}", "+model.decoder.x=7.0"])
