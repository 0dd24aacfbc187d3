"""Text without audio: lines, prompts, packed rows, and a language model alone that learns from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import Config, DataConfig, RowSize
from data.errors import DataError
from data.loader import empty_batch, make_loader
from data.manifest import read_manifest
from data.packing import AUDIO, IGNORE
from data.prompts import FORMATS, Turn, spans
from data.tokenizer import encode_spans, load_tokenizer
from model import speech_lm
from parallel.mesh import make_mesh, start_processes
from parallel.validate import Environment, validate
from training import config
from training.state import init_state
from training.step import make_engine, make_step, to_device

LINES: list[dict[str, Any]] = [{"text": "one two three"}, {"text": "four", "prompt": "after three"}, {"text": "seven eleven", "id": "x"}]


def manifest(folder: Path, lines: list[Any]) -> Path:
    (folder / "text.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder / "text.jsonl"


def data(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(kind="text", manifest=str(manifest(folder, LINES)), tokenizer="data/speech/tokenizer.json", encoder="none", workers=0,
                      shuffle=False, rows=[RowSize(tokens=64, utterances=4)], **changes)


def test_fewer_lines_than_processes(tmp_path):
    with pytest.raises(DataError, match="has 3 utterances for 4 data-parallel processes"):
        make_loader(data(tmp_path), 0, 3, 4)


def test_a_row_holds_texts_and_answers(tmp_path):
    cfg = data(tmp_path)
    batch, tokenizer = next(make_loader(cfg, 0, 0, 1)), load_tokenizer(cfg)
    assert batch["ids"] == ["text#1", "text#2", "x#3"]
    assert batch["texts"] == ["one two three", "four", "seven eleven"]
    bounds = batch["cu_seqlens_U1"].tolist()
    for u, line in enumerate(LINES):
        ids, labels = batch["tokens_T"][bounds[u] : bounds[u + 1]], batch["labels_T"][bounds[u] : bounds[u + 1]]
        question = tokenizer.encode(line["prompt"]) if "prompt" in line else []
        answer = [*(tokenizer.encode_next(line["text"])), tokenizer.eos_id]
        assert ids.tolist() == [*question, *answer]
        learnt = [*[IGNORE] * (len(question) - 1), *answer] if question else answer[1:]
        assert labels.tolist() == [*learnt, IGNORE]
    assert AUDIO not in batch["tokens_T"]
    assert (batch["frames_T"] == -1).all()
    assert len(batch["audio_S"]) == len(batch["audio_segments_A"]) == 0
    assert {name: t.shape for name, t in empty_batch(cfg.rows[0], "none").items()} == {
        name: t.shape for name, t in batch.items() if torch.is_tensor(t)}


def test_prompts_are_written_in_the_format(tmp_path):
    cfg = data(tmp_path, prompt_format="llama2", system="be brief", eos_token="<|eos|>")
    batch, tokenizer = next(make_loader(cfg, 0, 0, 1)), load_tokenizer(cfg)
    start, end = batch["cu_seqlens_U1"][1:3].tolist()
    prompt, _ = encode_spans(spans(FORMATS["llama2"], [Turn("system", "be brief"), Turn("user", "after three")], "<|eos|>"), tokenizer)
    answer = [*tokenizer.encode_next(" four "), tokenizer.eos_id]
    assert batch["tokens_T"][start:end].tolist() == [*prompt, *answer]
    assert batch["labels_T"][start:end].tolist() == [IGNORE] * (len(prompt) - 1) + [*answer, IGNORE]


@pytest.mark.parametrize("line, words", [({"prompt": "x"}, r"line 1 of .*: no text \(has: prompt\)"),
                                         ({"text": "x", "prompt": 3}, r"line 1 of .*: prompt is 3, not a string"),
                                         ({"text": " "}, r"text is empty"), ([1], r"is list, not a JSON object")])
def test_bad_lines_are_named(line, words, tmp_path):
    with pytest.raises(DataError, match=words):
        read_manifest(manifest(tmp_path, [line]), text_only=True)


def test_rows_of_a_parquet_file_are_lines(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"text": None, "prompt": None, "id": None, "other": 1.5}
    table = pytest.importorskip("pyarrow").Table.from_pylist([columns | line for line in LINES])
    parquet.write_table(table, tmp_path / "text.parquet")
    lines, rows = read_manifest(manifest(tmp_path, LINES), text_only=True), read_manifest(tmp_path / "text.parquet", text_only=True)
    assert len(rows) == len(lines) == 3
    assert [(u.id, u.text, u.extra) for u in (rows[i] for i in range(3))] == [(u.id, u.text, u.extra) for u in (lines[i] for i in range(3))]
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"text.parquet cannot be read as parquet .*; write it again"):
        read_manifest(tmp_path / "text.parquet", text_only=True)


def text_run(folder: Path) -> Config:
    cfg, missing = config.load([
        "+experiment=digits", "data=text", "model.encoder=null", "train.ctc_weight=0", f"data.manifest={manifest(folder, LINES)}",
        "data.tokenizer=data/speech/tokenizer.json", "data.rows=[{tokens: 64, utterances: 4}]", "data.workers=0", "compile.enabled=false",
        "model.decoder.pattern=*E", "optimizer.warmup_steps=1", "optimizer.lr=0.01"])
    assert missing == []
    return cfg


def test_a_language_model_alone_learns(tmp_path):
    cfg = text_run(tmp_path)
    assert validate(cfg, Environment(1, "train.py")) == []
    start_processes(torch.device("cpu"))
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state = init_state(speech_lm.spec(cfg), 0, mesh)
    assert {name.partition(".")[0] for name in state.params} == {"decoder"}
    step, batch, losses = make_step(cfg, mesh, make_engine(cfg, mesh)), next(make_loader(cfg.data, 0, 0, 1)), []
    for _ in range(8):
        state, metrics = step(state, [to_device(batch, mesh)])
        losses.append(metrics["loss"].item())
    assert losses[-1] < 0.6 * losses[0]


def test_text_and_encoders_do_not_mix(tmp_path):
    cfg = text_run(tmp_path)
    cfg.data.kind = "manifest"
    (sentence,) = validate(cfg, Environment(1, "train.py"))
    assert sentence.startswith("data.kind=manifest does not fit a model without an encoder")
