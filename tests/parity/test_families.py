"""Every family against its owner's classes: logits, loss, each gradient; exports opened by the owner; what is refused, and how."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hub.family import HubError
from model.hub.load import load
from tests.parity import owners
from tests.parity.check import CASES, check
from tests.parity.results import single_mesh

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", CASES)
def test_family(transformers, name, tmp_path):
    errors = check(transformers, name, tmp_path)
    assert errors.passed, errors


@pytest.fixture(scope="module")
def llama(transformers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    owners.make(transformers, "llama linear").save_pretrained(folder)
    return folder


def changed(folder: Path, to: Path, tensors=None, **config) -> Path:
    """A copy with other tensors or keys of config.json."""
    shutil.copytree(folder, to)
    if tensors is not None:
        save_file(tensors, to / "model.safetensors")
    content = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(content))
    return to


def test_everything_that_does_not_fit_is_listed_at_once(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.7.surprise"] = torch.zeros(2)
    with pytest.raises(HubError) as error:
        load(changed(llama, tmp_path / "x", tensors), single_mesh())
    message = str(error.value)
    assert "missing model.norm.weight [32]" in message
    assert "extra model.layers.7.surprise [2]" in message
    assert "model.layers.0.self_attn.q_proj.weight is [3, 4] and should be [64, 32]" in message
    assert message.count(";") == 2


def test_what_is_left_out_knowingly_is_said(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for n in range(2)}
    (note,) = load(changed(llama, tmp_path / "x", tensors | frequencies), single_mesh()).notes
    assert note.startswith("left out 2 tensors like model.layers.0.self_attn.rotary_emb.inv_freq: ")


def test_a_tied_head_may_be_stored_twice(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    loaded = load(changed(llama, tmp_path / "x", tensors, tie_word_embeddings=True), single_mesh())
    assert "decoder.head.weight" not in loaded.tensors
    (note,) = loaded.notes
    assert note == "left out 1 tensors like lm_head.weight: the head is the embedding"
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(HubError, match=r"lm_head.weight and model.embed_tokens.weight differ and config.json ties them"):
        load(changed(llama, tmp_path / "y", tensors, tie_word_embeddings=True), single_mesh())


@pytest.mark.parametrize("config, words", [
    (dict(model_type="bloom"), "model_type 'bloom'; served are nemotron_h"),
    (dict(hidden_act="gelu", attention_dropout=0.1), r"hidden_act='gelu' \(served: 'silu'\), attention_dropout=0.1"),
    (dict(rope_parameters=dict(rope_type="proportional")), "type 'proportional'; served are default"),
    (dict(rope_parameters=dict(rope_type="longrope", factor=2.0)), "type 'longrope' and lacks their short_factor, long_factor"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=None), "lacks max_position_embeddings"),
    (dict(rope_parameters=dict(rope_type="linear", factor=None)), "type 'linear' and lacks their factor"),
    (dict(hidden_size=None, vocab_size=None), "lacks hidden_size, vocab_size"),
])
def test_configurations_that_are_not_served(llama, tmp_path, config, words):
    with pytest.raises(HubError, match=words):
        load(changed(llama, tmp_path / "x", **config), single_mesh())


def test_folders_that_are_none(tmp_path):
    with pytest.raises(HubError, match=r"holds neither config.json nor, .*; give the folder of a published checkpoint or a .nemo file"):
        load(tmp_path, single_mesh())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2,
                                                      "hidden_size": 8, "vocab_size": 4, "intermediate_size": 8}))
    with pytest.raises(HubError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path, single_mesh())
    (tmp_path / "model.safetensors").write_bytes(b"\x07" + bytes(20))
    with pytest.raises(HubError, match=r"model.safetensors cannot be read"):
        load(tmp_path, single_mesh())
