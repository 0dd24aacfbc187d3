"""The command line: inspect, convert (folders, runs, adapters), verify, counts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config, LoraConfig
from model import lora, params, speech_lm
from model.hub.__main__ import main, run
from model.hub.family import HubError
from model.hub.load import load
from tests.model.hub.test_rows import model, written
from tests.parity.results import single_mesh
from training import checkpoint, config
from training.state import init_state


def test_inspect_tells_family_configuration_and_what_is_left_out(tmp_path, capsys):
    written("qwen3_moe", tmp_path)
    result = run(["inspect", str(tmp_path)])
    spec = speech_lm.model_spec(model("qwen3_moe"))
    assert result == {"family": "qwen3_moe", "parameters": params.count(spec), "tensors": 35, "types": ["bfloat16"], "left_out": []}
    printed = capsys.readouterr().out
    assert "Qwen 3 with experts (qwen3_moe)" in printed
    assert "pattern: '*E*-'" in printed or "pattern: \"*E*-\"" in printed


def test_convert_rewrites_a_folder_in_other_files(tmp_path):
    written("llama", tmp_path / "a")
    result = run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--limit", "0.000001"])
    assert result == {"family": "llama", "out": str(tmp_path / "b"), "files": 5}
    assert run(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == {"tensors": 31, "not_finite": 0, "different": 0}
    written("qwen3", tmp_path / "q")
    with pytest.raises(HubError, match="--family qwen3 contradicts .*a, which is llama; leave --family out"):
        run(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--family", "qwen3"])
    with pytest.raises(HubError, match="a is llama and --like .*q is qwen3; name a folder of the same family"):
        run(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--like", str(tmp_path / "q")])


WIDE = re.compile(r".*\.(A_log|D|dt_bias)")  # kept in fp32
WIDE_ONE = "backbone.layers.0.mixer.A_log"


@pytest.mark.parametrize(("asked", "dtype"), [("fp16", torch.float16), ("fp32", torch.float32), (None, torch.bfloat16)])
def test_convert_to_a_type_keeps_what_is_wider_than_most(tmp_path: Path, asked: str | None, dtype: torch.dtype) -> None:
    written("nemotron_h", tmp_path / "a")
    before = {name: t.float() if WIDE.fullmatch(name) else t for name, t in load_file(tmp_path / "a" / "model.safetensors").items()}
    before[WIDE_ONE] += 1e-5  # which 16 bits do not hold
    save_file(before, tmp_path / "a" / "model.safetensors")
    run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), *([] if asked is None else ["--dtype", asked])])
    after = load_file(tmp_path / "b" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, t in after.items():
        kept = WIDE.fullmatch(name) or name.endswith("e_score_correction_bias")
        assert t.dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(t, before[name].to(t.dtype)), name
    contents = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in "ab"]
    assert contents[1] == contents[0] | {"torch_dtype": str(dtype).removeprefix("torch.")}


def test_convert_refuses_a_type_that_cannot_hold_the_numbers(tmp_path: Path) -> None:
    written("llama", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.norm.weight"][1] = 1e5
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(HubError, match=r"^decoder.head.norm has numbers beyond those of float16; choose another type with --dtype"):
        run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "fp16"])


def test_paths_without_a_checkpoint_are_told_what_they_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints" / "step_00000003.incomplete").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.safetensors").write_text("")
    published = "give the folder of a published checkpoint or a .nemo file"
    own = "give a run's folder or one of its checkpoints/step_*"
    for command, name, words in (
            ("inspect", "none", f"does not exist; {published}"), ("inspect", "none.nemo", f"does not exist; {published}"),
            ("verify", "x.safetensors", f"is neither a folder nor a .nemo file; {published}"),
            ("inspect", "empty", f"holds neither config.json nor, like an unpacked .nemo file, model_config.yaml; {published}"),
            ("inspect", "run", f"is of a run and not published; python -m model.hub convert {tmp_path / 'run'} OUT makes a folder that is"),
            ("convert", "none", f"does not exist; {published}"),
            ("convert", "run", f"holds no complete checkpoint: of checkpoints it has checkpoints/step_00000003.incomplete alone; {own}"),
            ("adapter", "none", f"does not exist; {own}"),
            ("adapter", "empty", f"holds no complete checkpoint: it lacks checkpoints/step_*; {own}")):
        assert main([command, str(tmp_path / name), *([str(tmp_path / "out")] if command in ("convert", "adapter") else [])]) == 2
        assert capsys.readouterr() == ("", f"error: {tmp_path / name} {words}\n")


def test_inspect_says_nothing_before_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("that its configuration describes: missing model.norm.weight [12]\n")


def test_verify_finds_what_differs_and_what_is_not_finite(tmp_path, capsys):
    for name in ("a", "b"):
        torch.manual_seed(0)
        written("llama", tmp_path / name)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] += 1
    tensors["model.norm.weight"][1] = torch.inf
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    for one, other in (("b", "a"), ("a", "b")):  # in either of the two
        assert run(["verify", str(tmp_path / one), str(tmp_path / other)]) == {"tensors": 31, "not_finite": 1, "different": 2}
    tensors["model.norm.weight"][1] = torch.nan
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    assert run(["verify", str(tmp_path / "b")]) == {"tensors": 31, "not_finite": 1, "different": 0}
    assert [main(["verify", str(tmp_path / name)]) for name in ("a", "b", "none")] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert "not finite: decoder.head.norm" in printed
    assert "different: decoder.layers.3.up" in printed
    written("llama", tmp_path / "c", d_model=8)
    with pytest.raises(HubError, match=r"has no decoder.embedding.weight of shape \[10, 12\]; it is another model"):
        run(["verify", str(tmp_path / "a"), str(tmp_path / "c")])


@pytest.fixture(params=[0, 2], ids=["whole", "adapters"])
def trained(request: Any, tmp_path: Path) -> tuple[Path, Config, dict[str, Any]]:
    """A run's folder with a checkpoint, and its tensors."""
    cfg = Config(model=model("llama"), run_dir=str(tmp_path / "run"))
    cfg.train.ctc_weight = 0
    cfg.model.lora = LoraConfig(rank=request.param, dora=True)
    mesh = single_mesh()
    state = init_state(speech_lm.spec(cfg), 3, mesh)
    for name, w in state.params.items():
        if name.endswith("_lora.b") or name.endswith("magnitude"):
            w.to_local().normal_()
    content = config.to_dict(replace(cfg, data=replace(cfg.data, manifest="", tokenizer="data/speech/tokenizer.json")))
    checkpoint.save(tmp_path / "run", state, None, mesh, 1, content)
    return tmp_path / "run", cfg, {name: w.full_tensor() for name, w in state.params.items()}


def test_convert_writes_a_run_with_its_adapters_merged(trained, tmp_path):
    folder, cfg, tensors = trained
    assert run(["convert", str(folder), str(tmp_path / "out"), "--family", "llama", "--dtype", "fp32"])["files"] == 1
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 1}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<|eos|>"
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"] == json.loads(
        Path("data/speech/tokenizer.json").read_text())["model"]
    loaded = load(tmp_path / "out", single_mesh())
    assert loaded.tensors.keys() == {path for path, _ in params.named_leaves(speech_lm.model_spec(cfg.model))}
    for path, t in loaded.tensors.items():
        adapter = {part: tensors[f"{path}_lora.{part}"] for part in ("a", "b", "magnitude") if f"{path}_lora.{part}" in tensors}
        assert torch.equal(t.full_tensor(), lora.merged(tensors[path], adapter, 8.0) if adapter else tensors[path]), path
    with pytest.raises(HubError, match=r"name one with --family, or a published folder with --like"):
        run(["convert", str(folder), str(tmp_path / "other")])
    with pytest.raises(HubError, match=r"--family qwen3 contradicts .*, which is llama; leave --family out"):
        run(["convert", str(folder), str(tmp_path / "other"), "--family", "qwen3", "--like", str(tmp_path / "out")])
    assert run(["convert", str(folder), str(tmp_path / "again"), "--like", str(tmp_path / "out")])["family"] == "llama"
    assert (tmp_path / "again" / "generation_config.json").exists()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_counts_are_the_published_ones(capsys):
    assert run(["counts"]) == {"families": 7, "models": 10, "mismatched": []}
    assert "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: 31,577,937,344 parameters" in capsys.readouterr().out
