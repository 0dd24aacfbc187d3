"""The command line: inspect, convert (folders, runs, adapters), verify, counts."""

import json
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
