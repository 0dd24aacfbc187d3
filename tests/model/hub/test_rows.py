"""Rows, boxes and files without any owner's class: names, partial reads, both directions, size limits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema import DecoderConfig, ModelConfig
from model import params, speech_lm
from model.hub.families import FAMILIES, nemotron_h
from model.hub.family import HubError, entries
from model.hub.files import INDEX, Folder, Writer
from model.hub.load import load, read_box, read_config
from model.hub.rows import match, renamed, row
from model.hub.save import _over, save
from tests.parity.results import single_mesh

SMALL = DecoderConfig(d_model=12, vocab_size=10, n_heads=2, n_kv_heads=1, head_dim=8, mlp_ffn=6, rope_theta=100.0, activation="swiglu")
MODELS = {
    "nemotron_h": replace(SMALL, pattern="ME*-", rope_theta=None, activation="relu2", n_experts=4, top_k=2, moe_ffn=5, shared_ffn=7,
                          moe_latent=3, mlp_bias=True, mamba_heads=2, mamba_head_dim=4, mamba_groups=1, mamba_state=3, mamba_bias=True),
    "llama": replace(SMALL, pattern="*-*-", attention_bias=True, mlp_bias=True),
    "mistral": replace(SMALL, pattern="W-W-", window=3),
    "qwen2": replace(SMALL, pattern="*-W-", window=3, attention_bias=True, attention_out_bias=False, tie_embeddings=True),
    "qwen3": replace(SMALL, pattern="*-W-", window=3, qk_norm=True),
    "qwen3_moe": replace(SMALL, pattern="*E*-", qk_norm=True, router="softmax", router_bias=False, routed_scaling=1.0,
                         n_experts=4, top_k=2, moe_ffn=5, shared_ffn=0),
    "glm": replace(SMALL, pattern="*-*-", rope_fraction=0.5, attention_bias=True, attention_out_bias=False),
    "glm4": replace(SMALL, pattern="*-", rope_fraction=0.5, attention_out_bias=False, post_norm=True),
}


def model(kind: str, **changes: Any) -> ModelConfig:
    return ModelConfig(encoder=None, decoder=replace(MODELS[kind], **changes))


def drawn(cfg: ModelConfig) -> dict[str, Tensor]:
    """Random numbers for every parameter and buffer, 16-bit ones so that bf16 files lose nothing."""
    return {path: (0.2 * torch.randn(p.shape)).bfloat16().float() for path, p in params.named_leaves(speech_lm.model_spec(cfg))}


def written(kind: str, folder: Path, **changes: Any) -> dict[str, Tensor]:
    cfg = model(kind, **changes)
    weights = drawn(cfg)
    save(folder, FAMILIES[kind], cfg, lambda path, _: weights[path])
    return weights


@pytest.mark.parametrize("kind", MODELS)
def test_configurations_survive_the_way_out_and_back(kind, tmp_path):
    written(kind, tmp_path)
    family, cfg = read_config(tmp_path)
    assert family is FAMILIES[kind]
    assert cfg == model(kind)


@pytest.mark.parametrize("scaling", [
    dict(kind="linear", factor=2.0),
    dict(kind="yarn", factor=4.0, trained_positions=64, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, truncate=False),
    dict(kind="llama3", factor=8.0, trained_positions=32, low_frequency=2.0, high_frequency=5.0),
    dict(kind="dynamic", factor=3.0, trained_positions=48),
    dict(kind="longrope", factor=3.0, trained_positions=32, attention_factor=1.1, short_factors=[1.0] * 4, long_factors=[1.0, 2.0, 3.0, 4]),
])
def test_rotary_scaling_survives_in_the_new_form_and_in_the_old(scaling, tmp_path):
    cfg = model("llama")
    cfg.decoder.rope_scaling = replace(cfg.decoder.rope_scaling, **scaling)
    content = FAMILIES["llama"].write(cfg)
    for dropped in (("rope_scaling", "rope_theta"), ("rope_parameters",)):
        assert FAMILIES["llama"].read({k: v for k, v in content.items() if k not in dropped}) == cfg


@pytest.mark.parametrize("kind", MODELS)
def test_every_box_of_every_tensor_is_that_part_of_it(kind, tmp_path):
    weights = written(kind, tmp_path)
    generator = torch.Generator().manual_seed(0)
    with Folder(tmp_path) as folder:
        found = list(entries(FAMILIES[kind].variants[0], model(kind), ("decoder.",)))
        assert sorted(folder.shapes()) == sorted(block.name for entry in found for block in entry.blocks)
        for entry in found:
            full = weights[entry.path]
            boxes = [[(0, n) for n in full.shape]]
            for _ in range(6):
                ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in full.shape]
                boxes.append([(a, b - a) for a, b in ends])
            for box in boxes:
                expected = full[tuple(slice(a, a + n) for a, n in box)]
                assert torch.equal(read_box(folder, entry, box), expected), (entry.path, box)


def test_rows_that_pad_the_vocabulary_are_not_stored(tmp_path):
    weights = written("llama", tmp_path, vocab_multiple=8)
    with Folder(tmp_path) as folder:
        assert folder.shapes()["model.embed_tokens.weight"] == [10, 12]
        (entry, *_) = entries(FAMILIES["llama"].variants[0], model("llama", vocab_multiple=8), ("decoder.",))
        got = read_box(folder, entry, [(0, 16), (0, 12)])
    assert torch.equal(got[:10], weights["decoder.embedding.weight"][:10])
    assert not got[10:].any()


def test_blocks_number_two_letters_each_and_nemotron_one():
    rows = FAMILIES["qwen3"].variants[0]
    for path, name in (("decoder.layers.6.norm", "input_layernorm"), ("decoder.layers.7.norm", "post_attention_layernorm")):
        found = match(rows, path)
        assert found is not None
        assert (found[0].theirs, found[1]) == ((f"model.layers.{{n}}.{name}.weight",), 3)
    assert match(rows, "decoder.layers.6.up") is None
    found = match(nemotron_h.ROWS, "decoder.layers.7.norm")
    assert found is not None
    assert found[1] == 7


def test_prefixes_are_renamed_by_the_longest_that_fits():
    (r,) = renamed([row("a", "model.x.weight", "lm_head.weight")], {"model.": "llm.", "model.x.": "y.", "x": "z"})
    assert r.theirs == ("y.weight", "lm_head.weight")


def test_a_model_without_a_place_in_the_family_is_refused(tmp_path):
    with pytest.raises(HubError, match=r"no place for decoder.layers.0.post_norm; change"):
        written("llama", tmp_path, post_norm=True)


def test_values_that_are_not_finite_are_not_exported(tmp_path):
    cfg = model("llama")
    with pytest.raises(HubError, match=r"decoder.embedding.weight has values that are not finite"):
        save(tmp_path, FAMILIES["llama"], cfg, lambda path, p: torch.full(p.shape, torch.nan))


def test_files_stay_within_their_limit_and_the_index_finds_everything(tmp_path):
    plan = {"a": (torch.float32, (4,)), "b": (torch.bfloat16, (6,)), "c": (torch.float32, (100,)), "d": (torch.float16, (2, 3))}
    values = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in plan.items()}
    writer = Writer(tmp_path, plan, 28)
    for name, value in values.items():
        writer.write(name, value)
    writer.close()
    assert writer.files == [["a", "b"], ["c"], ["d"]]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 16 + 12 + 400 + 12
    assert index["weight_map"]["c"] == "model-00002-of-00003.safetensors"
    with Folder(tmp_path) as folder:
        assert folder.dtypes() == {name: dtype for name, (dtype, _) in plan.items()}
        for name, value in values.items():
            assert torch.equal(folder.read(name, [slice(None)] * value.ndim), value)


def test_companions_types_and_unchanged_keys_come_from_the_folder_that_it_is_like(tmp_path):
    weights = written("qwen3_moe", tmp_path / "a")
    content = json.loads((tmp_path / "a" / "config.json").read_text()) | {"eos_token_id": 7}
    (tmp_path / "a" / "config.json").write_text(json.dumps(content))
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    save(tmp_path / "b", FAMILIES["qwen3_moe"], model("qwen3_moe"), lambda path, _: weights[path], like=tmp_path / "a")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == content
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    longer = model("qwen3_moe", vocab_size=11)
    more = drawn(longer)
    save(tmp_path / "c", FAMILIES["qwen3_moe"], longer, lambda path, _: more[path], like=tmp_path / "a")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == content | {"vocab_size": 11}


def test_a_run_knows_more_than_config_json_and_keeps_its_sections(tmp_path):
    """What only this project has (where a run started from, patterns of frozen parameters) is no change; a changed size changes its key."""
    weights = written("qwen3_moe", tmp_path / "a")
    content = json.loads((tmp_path / "a" / "config.json").read_text()) | {"extra": {"kept": 1}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(content))
    cfg = replace(model("qwen3_moe"), pretrained=str(tmp_path / "a"), freeze_params=["head"])
    save(tmp_path / "b", FAMILIES["qwen3_moe"], cfg, lambda path, _: weights[path], like=tmp_path / "a")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == content
    assert _over({"x": {"target": "t", "size": 1}, "y": 2}, {"x": {"size": 3}, "z": 4}) == {"x": {"target": "t", "size": 3}, "y": 2, "z": 4}


def test_windows_follow_from_either_way_of_saying_them():
    content = FAMILIES["qwen3"].write(model("qwen3")) | {"num_hidden_layers": 3}
    del content["layer_types"], content["max_window_layers"]
    read = FAMILIES["qwen3"].read
    assert read(content | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}).decoder.pattern == "*-*-W-"
    assert read(content | {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 2}).decoder.pattern == "*-*-*-"
    assert read(content | {"use_sliding_window": True, "sliding_window": 7}).decoder.window == 4096  # the first 28 layers have none
    assert FAMILIES["mistral"].read(content | {"sliding_window": None}).decoder.pattern == "*-*-*-"


def test_rotary_settings_of_older_files():
    ours = ("rope_parameters", "rope_theta", "rope_scaling")
    content = {k: v for k, v in FAMILIES["llama"].write(model("llama")).items() if k not in ours}
    read = FAMILIES["llama"].read
    assert read(content).decoder.rope_theta == 10000.0
    scaled = read(content | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}).decoder
    assert (scaled.rope_theta, scaled.rope_scaling.kind, scaled.rope_scaling.factor) == (5e5, "linear", 2.0)
    yarn = read(content | {"max_position_embeddings": 777, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}).decoder
    assert yarn.rope_scaling.trained_positions == 777
    glm = FAMILIES["glm"].write(model("glm"))
    assert FAMILIES["glm"].read({k: v for k, v in glm.items() if k != "rope_parameters"} | {"partial_rotary_factor": None}
                                ).decoder.rope_fraction == 0.5


def test_the_head_for_several_tokens_is_left_out_knowingly(tmp_path):
    written("nemotron_h", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.layers.0.norm.weight": torch.zeros(2), "backbone.mtp.x": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    content = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1, "torch_dtype": "kept"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    loaded = load(tmp_path, single_mesh())
    save(tmp_path / "out", loaded.family, loaded.cfg, lambda path, p: torch.zeros(p.shape), like=tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == content | {"num_nextn_predict_layers": 0}
    (note,) = loaded.notes
    assert note == "left out 2 tensors like backbone.mtp.x: the head that predicts several tokens is not built here"


def test_an_export_of_nemotron_names_its_layers_in_one_way(tmp_path):
    """The owner's own code knows the pattern alone; a list of another model's layers beside it would say two things."""
    weights = written("nemotron_h", tmp_path / "a")
    content = json.loads((tmp_path / "a" / "config.json").read_text())
    assert content["hybrid_override_pattern"] == "ME*-"
    assert "layers_block_type" not in content
    del content["hybrid_override_pattern"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(content | {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}))
    (tmp_path / "a" / "modeling_nemotron_h.py").write_text("class NemotronHForCausalLM: ...")
    save(tmp_path / "b", FAMILIES["nemotron_h"], model("nemotron_h"), lambda path, _: weights[path], like=tmp_path / "a")
    assert "hybrid_override_pattern" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert (tmp_path / "b" / "modeling_nemotron_h.py").exists()
    shorter = model("nemotron_h", pattern="ME*")
    with pytest.raises(HubError, match=r"says in other keys what this model changes; export it without, as --family nemotron_h"):
        save(tmp_path / "c", FAMILIES["nemotron_h"], shorter, lambda path, _: weights[path], like=tmp_path / "a")


@pytest.mark.parametrize("changes, words", [
    ({"qk_norm": True}, r"Llama cannot hold this model: its config.json has no words for decoder.layers.0.k_norm, decoder.layers.0.q_norm"),
    ({"pattern": "W-W-", "window": 4}, r"has no words for model.decoder.pattern=W-W-, model.decoder.window=4; name another with --family")])
def test_a_family_without_words_for_a_model_does_not_hold_it(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    cfg = model("llama", **changes)
    weights = drawn(cfg)
    with pytest.raises(HubError, match=words):
        save(tmp_path, FAMILIES["llama"], cfg, lambda path, _: weights[path])
