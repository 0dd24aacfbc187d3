"""What is exported opens without naming its class: transformers' Auto classes find model, tokenizer and end tokens in the folder."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from configs.schema import Config, DataConfig
from data.tokenizer import load_tokenizer
from model import speech_lm
from model.hub.__main__ import run
from model.hub.families import FAMILIES
from model.hub.save import save
from tests.model.hub.test_rows import MODELS, drawn, model
from tests.parity.results import single_mesh
from training import checkpoint, config
from training.state import init_state

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_written_like_no_other(transformers: ModuleType, kind: str, tmp_path: Path) -> None:
    cfg = model(kind)
    weights = drawn(cfg)
    save(tmp_path, FAMILIES[kind], cfg, lambda path, _: weights[path], dtype=torch.float32)
    opened, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(opened).__name__ == FAMILIES[kind].architecture
    assert not any(told.values()), told
    assert torch.equal(opened.get_input_embeddings().weight, weights["decoder.embedding.weight"])


def test_a_run_with_its_tokenizer(transformers: ModuleType, tmp_path: Path) -> None:
    data = DataConfig(manifest="", tokenizer="data/speech/tokenizer.json")
    ours = load_tokenizer(data)
    cfg = Config(model=model("qwen3", vocab_size=ours.vocab_size), data=data, run_dir=str(tmp_path / "run"))
    cfg.train.ctc_weight = 0
    state = init_state(speech_lm.spec(cfg), 3, single_mesh())
    checkpoint.save(tmp_path / "run", state, None, single_mesh(), 1, config.to_dict(cfg))
    run(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--family", "qwen3", "--dtype", "fp32"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "nineteen seventy one<|eos|>"
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text)
    assert theirs.decode(ids, skip_special_tokens=True).strip() == ours.decode(ids).strip() == "nineteen seventy one"
    assert (theirs.eos_token_id, theirs.convert_tokens_to_ids("<|audio|>")) == (ours.eos_id, ours.audio_id)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.generation_config.eos_token_id == ours.eos_id
    for name, w in (("decoder.embedding.weight", opened.get_input_embeddings().weight), ("decoder.head.weight", opened.lm_head.weight)):
        assert torch.equal(w, state.params[name].full_tensor())
    assert opened.config.vocab_size == ours.vocab_size
