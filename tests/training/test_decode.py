"""Decoding several tokens ahead is decoding token by token."""

from typing import Any

import pytest
import torch

from configs.schema import Config
from data.loader import decoding_batches
from model import speech_lm
from parallel.mesh import Mesh, make_mesh, start_processes
from training import config, decode
from training.engine import Engine
from training.state import State, init_state
from training.step import make_engine, to_device

ROOM = 12
NEVER = -1  # an end token that no model predicts


def test_what_is_settled() -> None:
    best = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    draft = torch.tensor([[1, 2, 9, 4], [9, 2, 3, 4], [1, 2, 3, 9]])
    assert decode.settled(best, draft).tolist() == [[True, True, True, False], [True, False, False, False], [True, True, True, True]]


@pytest.fixture(scope="module")
def model() -> tuple[Config, Mesh, Engine, State, dict[str, Any]]:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load(["+experiment=digits", "compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*",
                          "model.decoder.init_std=0.3", "data.validation_utterances=6", "data.workers=0"])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    (batch,) = decoding_batches(cfg.data, "held_out", 0, 1, ROOM)
    return cfg, mesh, make_engine(cfg, mesh), init_state(speech_lm.spec(cfg), 3, mesh), batch


def answers(model: tuple[Config, Mesh, Engine, State, dict[str, Any]], eos_id: int) -> list[list[int]]:
    cfg, mesh, engine, state, batch = model
    return decode.greedy(cfg, mesh, engine, state.leaves(), to_device(batch, mesh), batch["answer_starts"], batch["answer_room"], eos_id)


def test_ahead_equals_one_by_one(model: tuple[Config, Mesh, Engine, State, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = answers(model, NEVER)
    monkeypatch.setattr(decode, "AHEAD", 1)
    single = answers(model, NEVER)
    assert ahead == single
    assert all(len(answer) == ROOM for answer in single)
    assert len({tuple(answer) for answer in single}) > 1  # the answers depend on the audio


def test_an_answer_stops_before_its_end_token(model: tuple[Config, Mesh, Engine, State, dict[str, Any]]) -> None:
    whole = answers(model, NEVER)
    eos_id = whole[0][4]
    expected = [answer[: answer.index(eos_id)] if eos_id in answer else answer for answer in whole]
    assert answers(model, eos_id) == expected
    assert len(expected[0]) <= 4
