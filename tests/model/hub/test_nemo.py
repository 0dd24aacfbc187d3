"""NeMo's files: a recogniser's encoder out of a .nemo archive, and SALM with its embedding in each of its places."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema import ModelConfig
from model.hub.__main__ import run
from model.hub.families import FAMILIES
from model.hub.family import HubError
from model.hub.files import opened
from model.hub.load import load
from model.hub.save import save
from model.params import P
from tests.goldens import perception
from tests.model.hub.test_rows import drawn, model, written
from tests.parity.results import single_mesh

CONFIG: dict[str, Any] = {"preprocessor": perception.facts()["preprocessor"], "encoder": perception.facts()["encoder"]}
OTHERS = {"preprocessor.featurizer.window": torch.zeros(400), "preprocessor.featurizer.fb": torch.zeros(1, 128, 257),
          "encoder.layers.0.conv.batch_norm.num_batches_tracked": torch.tensor(5), "transf_decoder.layer": torch.zeros(2)}


def recogniser() -> dict[str, Tensor]:
    """The golden encoder's state dict as a recogniser holds it."""
    weights = {name.removeprefix("weights."): t for name, t in perception.tensors().items() if name.startswith("weights.")}
    return {f"encoder.{name}": t for name, t in weights.items()} | OTHERS


def archive(folder: Path, mode: Any = "w", config: dict[str, Any] = CONFIG) -> Path:
    """A .nemo file."""
    OmegaConf.save(config, folder / "model_config.yaml")
    torch.save(recogniser(), folder / "model_weights.ckpt")
    with tarfile.open(folder / "x.nemo", mode) as tar:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            tar.add(folder / name, f"./{name}")
    return folder / "x.nemo"


@pytest.mark.parametrize("mode", ["w", "w:gz", "unpacked"])
def test_encoder_of_an_archive(mode, tmp_path):
    config = {**CONFIG, "encoder": CONFIG["encoder"] | {"feat_in": "${preprocessor.features}"}, "train_ds": {"path": "${oc.env:NOWHERE}"}}
    packed = archive(tmp_path, "w" if mode == "unpacked" else mode, config)
    loaded = load(tmp_path if mode == "unpacked" else packed, single_mesh())
    assert loaded.cfg.encoder == perception.ENCODER
    assert len(loaded.tensors) == sum(name.startswith("weights.") and "tracked" not in name for name in perception.tensors())
    for path, t in loaded.tensors.items():
        expected = perception.tensors()[f"weights.{perception.theirs(path.removeprefix('encoder.'))}"]
        assert torch.equal(t if isinstance(t, Tensor) and not hasattr(t, "full_tensor") else t.full_tensor(), expected), path
    assert [note.rpartition(": ")[2] for note in loaded.notes] == [
        "the front end computes its window and filters, in fp32", "the momentum of the running statistics is a constant",
        "only the encoder of a recogniser is taken"]


def test_an_encoder_goes_back_into_its_archive(tmp_path):
    """What nothing was trained of keeps its bits; what was is there, under NeMo's names."""
    source = archive(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "same.nemo")])["files"] == 1
    loaded = load(source, single_mesh())
    trained = {path: torch.randn_like(t.full_tensor() if hasattr(t, "full_tensor") else t) for path, t in loaded.tensors.items()}
    save(tmp_path / "y.nemo", loaded.family, loaded.cfg, lambda path, _: trained[path], like=source)
    before = recogniser()
    for name, expected in (("same.nemo", before), ("y.nemo", before | {
            f"encoder.{perception.theirs(path.removeprefix('encoder.'))}": t for path, t in trained.items()})):
        with tarfile.open(tmp_path / name) as tar:
            tar.extractall(tmp_path / "out", filter="data")
        after = torch.load(tmp_path / "out" / "model_weights.ckpt", weights_only=True)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], expected[key]) and after[key].dtype == before[key].dtype for key in before)
        assert (tmp_path / "out" / "model_config.yaml").read_text() == (tmp_path / "model_config.yaml").read_text()
    for out, layers in ((tmp_path / "folder", 2), (tmp_path / "z.nemo", 3)):
        other = replace(loaded.cfg, encoder=replace(perception.ENCODER, n_layers=layers))
        with pytest.raises(HubError, match=r"is to be a .nemo file with an encoder like that of .*x.nemo"):
            save(out, loaded.family, other, lambda path, _: trained[path], like=source)


@pytest.mark.parametrize("section, changes, words", [
    ("encoder", dict(subsampling="striding", att_context_size=[70, 1]), r"subsampling='striding' .*att_context_size=\[70, 1\]"),
    ("preprocessor", dict(normalize="NA"), "normalize='NA'"), ("encoder", dict(d_model=None), "lacks d_model")])
def test_other_recognisers_are_refused(section, changes, words, tmp_path):
    with pytest.raises(HubError, match=words):
        load(archive(tmp_path, config=CONFIG | {section: CONFIG[section] | changes}), single_mesh())


def test_archives_that_are_none(tmp_path):
    (tmp_path / "y.nemo").write_text("no archive")
    with pytest.raises(HubError, match=r"configuration of .*y.nemo cannot be read"):
        load(tmp_path / "y.nemo", single_mesh())
    with tarfile.open(tmp_path / "z.nemo", "w"):
        pass
    with pytest.raises(HubError, match=r"holds no model_config.yaml"):
        load(tmp_path / "z.nemo", single_mesh())


def salm(folder: Path, place: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A canary-qwen folder: golden encoder, random projection, random Qwen 3, its embedding in one of the places; and what it holds."""
    cfg = model("qwen3", tie_embeddings=True)
    ours = written("qwen3", folder / "llm", tie_embeddings=True)
    llm = {f"llm.{name}": t for name, t in load_file(folder / "llm" / "model.safetensors").items()}
    llm[place] = llm.pop("llm.model.embed_tokens.weight")
    projection = {"projector.weight": torch.randn(12, 64), "projector.bias": torch.randn(12)}
    theirs = {name.replace("projector", "perception.proj"): t for name, t in projection.items()}
    speech = {f"perception.{name}": t for name, t in recogniser().items() if not name.startswith("transf_decoder")}
    save_file({**llm, **theirs, **speech}, folder / "model.safetensors")
    content = {"pretrained_llm": "Qwen/Qwen3-1.7B", "pretrained_asr": "nvidia/canary-1b-flash",
               "perception": {**CONFIG, "output_dim": 12, "modality_adapter": {"_target_": "nemo.x.IdentityConnector"}}}
    (folder / "config.json").write_text(json.dumps(content))
    encoder = {f"encoder.{name}": t for name, t in perception.tensors().items()}
    return ModelConfig(encoder=perception.ENCODER, decoder=cfg.decoder), ours | projection | encoder


@pytest.mark.parametrize("place", ["llm.model.embed_tokens.weight", "embed_tokens.weight", "llm.lm_head.weight"])
def test_salm_with_its_embedding_anywhere(place, tmp_path):
    expected, ours = salm(tmp_path, place)
    (tmp_path / "llm_backbone").mkdir()
    (tmp_path / "llm_backbone" / "config.json").write_text((tmp_path / "llm" / "config.json").read_text())
    loaded = load(tmp_path, single_mesh())
    assert loaded.cfg == expected

    def whole(path: str, p: P) -> Tensor:
        t: Any = loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    for path in loaded.tensors:
        t: Any = loaded.tensors[path]
        wanted = ours.get(path)
        if wanted is None:
            wanted = ours[f"encoder.weights.{perception.theirs(path.removeprefix('encoder.'))}"]
        assert torch.equal(t.full_tensor() if hasattr(t, "full_tensor") else t, wanted), path
    save(tmp_path / "out", loaded.family, loaded.cfg, whole, like=tmp_path)
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    dropped = {f"perception.{name}" for name in OTHERS}
    assert after.keys() == before.keys() - dropped
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in after)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    again = load(tmp_path / "out", single_mesh())
    assert again.cfg == expected


def test_the_language_model_of_a_salm_must_be_described(tmp_path):
    salm(tmp_path, "embed_tokens.weight")
    with pytest.raises(HubError, match=r"Qwen/Qwen3-1.7B without describing it: put its config.json beside as llm_backbone/config.json"):
        load(tmp_path, single_mesh())
    content = json.loads((tmp_path / "config.json").read_text()) | {"pretrained_llm": str(tmp_path / "llm")}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load(tmp_path, single_mesh()).family.name == "SALM with Qwen 3"


def test_adapters_that_are_still_in_a_salm_are_merged(tmp_path):
    """As canary-qwen-2.5b is published: LoRA of rank 3 on the values, alpha 6, under peft's names."""
    _, ours = salm(tmp_path, "embed_tokens.weight")
    tensors = {name.replace("llm.", "llm.base_model.model.", 1): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    expected = {}
    for n in range(2):
        name = f"llm.base_model.model.model.layers.{n}.self_attn.v_proj"
        a, b, base = torch.randn(3, 12), torch.randn(8, 3), tensors.pop(f"{name}.weight")
        tensors |= {f"{name}.base_layer.weight": base, f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
        expected[f"decoder.layers.{2 * n}.v.weight"] = base.float() + 2 * b @ a
    save_file(tensors, tmp_path / "model.safetensors")
    content = json.loads((tmp_path / "config.json").read_text()) | {"pretrained_llm": str(tmp_path / "llm")}
    (tmp_path / "config.json").write_text(json.dumps(content | {"lora": {"dim": 3, "alpha": 6, "target_modules": ["v_proj"]}}))
    loaded = load(tmp_path, single_mesh())
    for path, matrix in expected.items():
        torch.testing.assert_close(loaded.tensors[path].full_tensor(), matrix, rtol=1e-6, atol=1e-6)
    assert torch.equal(loaded.tensors["decoder.layers.0.q.weight"].full_tensor(), ours["decoder.layers.0.q.weight"])
    with opened(tmp_path) as source:
        box = source.read("llm.model.layers.1.self_attn.v_proj.weight", (slice(2, 5), slice(3, 9)))
    torch.testing.assert_close(box, expected["decoder.layers.2.v.weight"][2:5, 3:9], rtol=1e-6, atol=1e-6)
    result = run(["convert", str(tmp_path), str(tmp_path / "out")])
    assert result["family"] == "salm/qwen3"
    assert "lora" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "llm.model.layers.0.self_attn.v_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content | {"lora": {"dim": 3, "alpha": 6, "use_dora": True}}))
    with pytest.raises(HubError, match=r"holds adapters and its config.json has lora=.*use_dora"):
        load(tmp_path, single_mesh())


def test_a_salm_that_is_like_no_other_says_what_nemo_asks(tmp_path):
    """Keys that SALMAutomodel, AudioPerceptionModule and from_pretrained of nemo-toolkit 3.0.0 read, and where they look for the rest."""
    cfg = ModelConfig(encoder=perception.ENCODER, decoder=model("qwen3").decoder)
    weights = drawn(cfg)
    save(tmp_path, FAMILIES["salm/qwen3"], cfg, lambda path, _: weights[path], more={"audio_locator_tag": "<|a|>", "prompt_format": "qwen"},
         limit_bytes=1000)
    content = json.loads((tmp_path / "config.json").read_text())
    told = {"audio_locator_tag": "<|a|>", "prompt_format": "qwen", "pretrained_llm": "llm_backbone", "use_nemo_automodel": True,
            "pretrained_weights": False}
    assert content | told == content
    heard = content["perception"]
    assert heard["target"] == "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule"
    assert heard["encoder"]["_target_"] == "nemo.collections.asr.modules.ConformerEncoder"
    assert heard["preprocessor"]["_target_"] == "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor"
    assert heard["modality_adapter"]["d_model"] == 64  # without it NeMo leaves the projection out
    assert heard["output_dim"] == 12
    assert json.loads((tmp_path / "llm_backbone" / "config.json").read_text())["model_type"] == "qwen3"
    assert "llm.model.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert load(tmp_path, single_mesh()).cfg == cfg
