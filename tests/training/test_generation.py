"""Generation with caches: the tokens and logits of recomputing everything, alone or beside others, greedy or drawn."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Config, GenerationConfig
from data.loader import decoding_batches
from data.tokenizer import load_tokenizer
from model import decoder, speech_lm
from parallel.mesh import Mesh, make_mesh, start_processes
from training import config, evaluation, generation
from training.engine import Pass
from training.generation import Weights, choose, generate
from training.state import init_state
from training.step import make_context, make_engine, state_dtype, to_device

LIMIT = 12
NEVER = -1  # an end token that no model predicts
ROW = "{tokens: 1000, audio_frames: 700, utterances: 9, utterance_frames: 144, label_tokens: 72}"


def weights_of(*changes: str) -> tuple[Weights, Mesh]:
    start_processes(torch.device("cpu"))
    cfg, _ = config.load(["+experiment=digits", "compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*WE-",
                          "model.decoder.window=9", "model.decoder.init_std=0.3", "data.validation_utterances=6", "data.workers=0",
                          f"data.rows=[{ROW}]", f"generation.max_new_tokens={LIMIT}", "train.ctc_weight=0", *changes])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    return Weights(cfg, mesh, make_engine(cfg, mesh), init_state(speech_lm.spec(cfg), 3, mesh, state_dtype(cfg)).leaves()), mesh


@pytest.fixture(scope="module")
def model() -> tuple[Weights, Mesh, dict[str, Any]]:
    weights, mesh = weights_of()
    (batch,) = decoding_batches(weights.cfg.data, "held_out", 0, 1)
    return weights, mesh, batch


def answers(weights: Weights, mesh: Mesh, batch: dict[str, Any], stop: int = NEVER) -> list[list[int]]:
    row = to_device(batch, mesh)
    return generate(weights, row, make_context(weights.cfg, row, mesh, training=False), longest=145, stop_ids=[stop], names=batch["ids"])


def recomputed(weights: Weights, mesh: Mesh, batch: dict[str, Any], tokens: list[list[int]]) -> Iterator[Tensor]:
    """fp32 logits [V] after the prompt of each request and all of its tokens but the last, one request at a time; [tokens, V]"""
    cfg = weights.cfg
    row = to_device(batch, mesh)
    for u, answer in enumerate(tokens):
        start, end = (int(n) for n in row["cu_seqlens_U1"][u : u + 2])
        after = answer[:-1]
        ids = torch.cat([row["tokens_T"][start:end], torch.tensor(after, dtype=torch.int64)])
        one = {**row, "tokens_T": ids, "frames_T": torch.cat([row["frames_T"][start:end], torch.full((len(after),), -1)])}
        context = make_context(cfg, row, mesh, training=False)
        x_AD = speech_lm.encode(Pass(weights.engine, weights.leaves, context), row, context, {})
        length = len(ids)
        context = generation.replace(context, cu_seqlens_U1=torch.tensor([0, length], dtype=torch.int32),
                                     segments_T=torch.zeros(length, dtype=torch.int32), positions_T=torch.arange(length))
        run = Pass(weights.engine, weights.leaves, context)
        x_TD = speech_lm.layers(run, speech_lm.embed(run, x_AD, one, context), context, {})
        yield run(speech_lm.head_unit(cfg.model), decoder.logits, x_TD, torch.arange(end - start - 1, length)).detach()


@pytest.mark.parametrize("changes, tolerance", [(("precision=fp64",), 1e-6), (("model.decoder.init_std=0.1",), 1e-5)], ids=["fp64", "fp32"])
def test_tokens_are_those_of_recomputing_everything(changes: tuple[str, ...], tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits come out in fp32 whatever the precision."""
    weights, mesh = weights_of(*changes)
    (batch,) = decoding_batches(weights.cfg.data, "held_out", 0, 1)
    seen = []

    def watched(logits: Tensor, *rest: Any) -> Tensor:
        seen.append(logits)
        return choose(logits, *rest)

    monkeypatch.setattr(generation, "choose", watched)
    found = answers(weights, mesh, batch)
    assert [len(answer) for answer in found] == [LIMIT] * 6
    assert len({tuple(answer) for answer in found}) == 6  # the model listens
    for u, expected in enumerate(recomputed(weights, mesh, batch, found)):
        got = torch.stack([logits[u] for logits in seen])
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()
        assert expected.argmax(-1).tolist() == found[u]


def test_a_stop_token_ends_an_answer_and_other_answers_go_on(model: tuple[Weights, Mesh, dict[str, Any]]) -> None:
    endless = answers(*model)
    stop = endless[0][5]
    ended = answers(*model, stop=stop)
    assert ended == [answer[: answer.index(stop)] if stop in answer else answer for answer in endless]
    assert len(ended[0]) <= 5 < max(map(len, ended))


def test_two_are_one_and_one(model: tuple[Weights, Mesh, dict[str, Any]]) -> None:
    """Neither the row's other prompts nor their order change an answer."""
    weights, mesh, batch = model
    together = dict(zip(batch["ids"], answers(*model), strict=True))
    alone: dict[tuple[int, str], list[int]] = {}
    for count in (1, 4):
        cfg = generation.replace(weights.cfg.data, rows=[generation.replace(weights.cfg.data.rows[0], utterances=count)])
        config_ = generation.replace(weights.cfg, data=cfg)
        fewer = Weights(config_, mesh, weights.engine, weights.leaves)
        for part in decoding_batches(cfg, "held_out", 0, 1):
            alone |= {(count, name): answer for name, answer in zip(part["ids"], answers(fewer, mesh, part), strict=True)}
    assert alone == {(count, name): together[name] for count in (1, 4) for name in together}


def test_a_prompt_that_is_longer_than_promised_is_refused(model: tuple[Weights, Mesh, dict[str, Any]]) -> None:
    weights, mesh, batch = model
    row = to_device(batch, mesh)
    with pytest.raises(ValueError, match="more than the 20 tokens"):
        generate(weights, row, make_context(weights.cfg, row, mesh, training=False), longest=20, stop_ids=[NEVER], names=batch["ids"])


def test_a_row_without_requests_answers_nothing(model: tuple[Weights, Mesh, dict[str, Any]]) -> None:
    weights, mesh, batch = model
    empty = {**batch, "ids": [], "cu_seqlens_U1": torch.zeros_like(batch["cu_seqlens_U1"]),
             "segments_T": torch.full_like(batch["segments_T"], 9), "audio_lengths_U": torch.zeros_like(batch["audio_lengths_U"])}
    assert answers(weights, mesh, empty) == []


def test_transcripts_and_stop_tokens(model: tuple[Weights, Mesh, dict[str, Any]]) -> None:
    weights, mesh, batch = model
    tokenizer = load_tokenizer(weights.cfg.data)
    found = evaluation.transcribe(weights, [batch], tokenizer)
    expected = dict(zip(batch["ids"], answers(weights, mesh, batch, tokenizer.eos_id), strict=True))
    assert [t.id for t in found] == sorted(batch["ids"])
    assert [t.hypothesis for t in found] == [tokenizer.decode(expected[t.id]).strip() for t in found]
    assert [t.audio_sec for t in found] == [int(batch["audio_samples_U"][batch["ids"].index(t.id)]) / 16000 for t in found]
    cfg = Config()
    cfg.generation.stop_tokens = ["a", " "]
    assert evaluation.stops(cfg, tokenizer) == [tokenizer.eos_id, *tokenizer.encode("a"), *tokenizer.encode(" ")]
    cfg.generation.stop_tokens = ["<|none|>"]
    with pytest.raises(evaluation.DataError, match=r"generation\.stop_tokens holds '<\|none\|>'"):
        evaluation.stops(cfg, tokenizer)


def test_pieces_are_joined_in_order() -> None:
    made = [("b", 1, "two", 1.0), ("a", 0, "x", 3.0), ("b", 10, "four", 0.5), ("b", 0, "one", 2.0), ("b", 2, "", 1.0),
            ("b", 9, "three", 1.0)]
    pieces = [(name, piece, evaluation.Transcript(name, f"ref {name}", text, sec)) for name, piece, text, sec in made]
    assert [vars(t) for t in evaluation.joined(pieces)] == [
        {"id": "a", "reference": "ref a", "hypothesis": "x", "audio_sec": 3.0},
        {"id": "b", "reference": "ref b", "hypothesis": "one two three four", "audio_sec": 5.5}]


def drawn(logits: Tensor, requests: range, position: int = 0, **changes: Any) -> Tensor:
    return choose(logits.expand(len(requests), -1), GenerationConfig(**changes), torch.tensor(list(requests)), position)


def test_draws_have_the_probabilities_of_the_model() -> None:
    p = torch.tensor([0.1, 0.45, 0.05, 0.3, 0.1])
    for temperature, top_p, expected in (
            (1.0, 1.0, p), (0.5, 1.0, p**2 / (p**2).sum()), (1.0, 0.7, torch.tensor([0, 0.6, 0, 0.4, 0])),
            (1.0, 0.76, torch.tensor([1 / 8.5, 4.5 / 8.5, 0, 3 / 8.5, 0])), (1.0, 0.2, torch.tensor([0, 1.0, 0, 0, 0]))):
        tokens = drawn(p.log(), range(20000), temperature=temperature, top_p=top_p)
        share = torch.bincount(tokens, minlength=5) / 20000
        assert (share - expected).abs().max() < 0.015, (temperature, top_p)
    assert (drawn(p.log(), range(9)) == 1).all()


def test_draws_depend_on_seed_request_and_position_alone() -> None:
    logits = torch.randn(50)
    options: dict[str, Any] = {"temperature": 1.0}
    once = drawn(logits, range(40), **options)
    assert torch.equal(once[10:20], drawn(logits, range(10, 20), **options))
    for other in (drawn(logits, range(40), position=1, **options), drawn(logits, range(40), seed=1, **options)):
        assert 0 < (once == other).sum() < 20


def test_compiled_steps_serve_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as they are: what the compiler makes of a layer has tests of its own, and takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    changes = ("compile.enabled=true", "model.decoder.pattern=M*", "model.encoder.n_layers=0", "data.validation_utterances=9")
    eager, mesh = weights_of(*changes)
    compiled, _ = weights_of(*changes, "compile.generation=true")
    first, *others = decoding_batches(eager.cfg.data, "held_out", 0, 1)
    expected = answers(eager, mesh, first)
    assert answers(compiled, mesh, first) == expected
    for batch in (first, *others):
        with torch.compiler.set_stance("fail_on_recompile"):
            assert answers(compiled, mesh, batch) == answers(eager, mesh, batch)
