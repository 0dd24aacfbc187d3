"""The example in docs/checkpoints.md runs as it is written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.tokenizer import load_tokenizer
from model.hub.families import FAMILIES
from tests.model.hub.test_rows import written
from training import config
from training.session import start

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "checkpoints.md"


def test_example_trains_and_exports_on_two_processes(tmp_path):
    torch.manual_seed(0)
    vocab = load_tokenizer(config.load(["+experiment=digits"])[0].data).vocab_size
    written("qwen3", tmp_path / "in", vocab_size=vocab)
    shutil.copyfile("data/speech/tokenizer.json", tmp_path / "in" / "tokenizer.json")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for name, path in (("FOLDER", "in"), ("OUT", "out"), ("TEXT", "text.jsonl")):
        code = code.replace(name, str(tmp_path / path))
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "example.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    first, then = map(float, re.findall(r"^loss (\d+\.\d+) then (\d+\.\d+)$", done.stdout, re.MULTILINE)[0])
    assert then < first
    overrides = re.findall(r'"([^"]+)"', code.partition("start([")[2].partition("])")[0].replace("parallel.tp=2", "parallel.tp=1"))
    session, state = start(overrides)
    assert session.loss(state, next(session.batches())) == pytest.approx(first, rel=1e-6)
    before, after = load_file(tmp_path / "in" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_wrong_number_of_processes_is_told_with_the_users_own_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--fast"])
    with pytest.raises(config.ConfigError, match=r"parallel.tp=2 needs .*; type torchrun --nproc_per_node=2 mine.py --fast;"):
        start(["+experiment=digits", "parallel.tp=2"])


def test_every_family_is_named():
    table = DOCS.read_text().partition("## Families")[2].partition("##")[0]
    served = set(re.findall(r"^\| ([\w/, ]+) \|", table, re.MULTILINE))
    assert {name for line in served for name in line.split(", ")} - {"model_type"} == set(FAMILIES)
