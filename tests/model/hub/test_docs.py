"""The example in docs/checkpoints.md runs as it is written."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from data.tokenizer import load_tokenizer
from model.hub.families import FAMILIES
from tests.model.hub.test_rows import written
from training import config

DOCS = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def test_example_trains_and_exports(tmp_path, capsys):
    torch.manual_seed(0)
    vocab = load_tokenizer(config.load(["+experiment=digits"])[0].data).vocab_size
    written("qwen3", tmp_path / "in", vocab_size=vocab)
    shutil.copyfile("data/speech/tokenizer.json", tmp_path / "in" / "tokenizer.json")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for name, path in (("FOLDER", "in"), ("OUT", "out"), ("TEXT", "text.jsonl")):
        code = code.replace(name, str(tmp_path / path))
    exec(compile(code, str(DOCS), "exec"), {})
    assert re.search(r"^loss \d+\.\d+ of Qwen 3$", capsys.readouterr().out, re.MULTILINE)
    before, after = load_file(tmp_path / "in" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_every_family_is_named():
    served = set(re.findall(r"^\| ([\w/, ]+) \|", DOCS.read_text(), re.MULTILINE))
    assert {name for line in served for name in line.split(", ")} - {"model_type"} == set(FAMILIES)
