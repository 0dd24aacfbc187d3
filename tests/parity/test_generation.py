"""Fifty prompts at once, of every family, against the owner and against one by one: the same tokens, where no two are as good as equal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import CompileConfig, Config
from model import speech_lm
from model.context import Context
from model.hub.load import load
from parallel.gather import Reshard
from tests.model.token_rows import token_row
from tests.parity import owners, results, speech
from tests.parity.check import CASES, SPEECH
from training.engine import Engine
from training.generation import Weights, generate
from training.step import Batch

pytestmark = pytest.mark.parity
PROMPTS, LONGEST, NEW, TIE = 50, 30, 6, 1e-4
STOP = speech.AUDIO_ID  # which the owner cannot read among text


@dataclass(frozen=True)
class Requests:
    """Prompts, where they come from, and how they become a row."""

    texts: list[Tensor]
    mels: list[Tensor]  # log-mel features [frames, M] before each text; none for a language model alone

    def row(self, cfg: Any, some: list[int]) -> tuple[Batch, Context]:
        """A packed row of some of them; features stand where samples would."""
        texts = [self.texts[i] for i in some]
        if not self.mels:
            return {"tokens_T": torch.cat(texts)}, token_row(cfg.decoder, [len(text) for text in texts])
        mel_AM, batch, context = speech.mel_row([self.mels[i] for i in some], cfg.encoder, cfg.decoder, texts)
        return {**batch, "audio_S": mel_AM}, context

    def owner_inputs(self, i: int, answer: list[int]) -> dict[str, Tensor]:
        """A prompt and its answer as the owner's class reads them."""
        ids = torch.cat([self.texts[i], torch.tensor(answer, dtype=torch.int64)])
        return speech.owner_inputs(self.mels[i], ids) if self.mels else {"input_ids": ids[None]}


def requests(with_audio: bool) -> Requests:
    """Random lengths, random tokens, random features."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (PROMPTS,), generator=g).tolist()
    frames = (8 * torch.randint(1, 11, (PROMPTS,), generator=g)).tolist() if with_audio else []
    return Requests([torch.randint(3, owners.VOCAB - 10, (n,), generator=g) for n in lengths],
                    [torch.randn(n, 80, generator=g) for n in frames])


def owners_choices(model: Any, inputs: dict[str, Tensor], answered: int) -> Iterator[tuple[int, float]]:
    """The owner's likeliest token after the prompt and after each token of the answer, and its lead over the next best."""
    with torch.no_grad():
        for logits in model(**inputs).logits[0, -answered - 1 :]:
            best = logits.topk(2)
            yield int(best.indices[0]), float(best.values[0] - best.values[1])


@pytest.mark.parametrize("name", CASES)
def test_fifty_prompts_at_once(transformers: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = speech.make_glm_asr(transformers) if name == SPEECH else owners.make(transformers, name)
    model.save_pretrained(tmp_path)
    mesh = results.single_mesh()
    loaded = load(tmp_path, mesh)
    cfg = Config(model=loaded.cfg)
    cfg.generation.max_new_tokens, cfg.train.ctc_weight = NEW, 0
    monkeypatch.setitem(speech_lm.FEATURES, "glm_asr", lambda mel_AM, ctx: mel_AM)
    engine = Engine(speech_lm.spec(cfg), speech_lm.units(cfg), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    weights, asked = Weights(cfg, mesh, engine, results.leaves(loaded)), requests(name == SPEECH)

    def ours(some: list[int]) -> list[list[int]]:
        batch, context = asked.row(cfg.model, some)
        context, names = replace(context, training=False), [str(i) for i in some]
        return generate(weights, batch, context, longest=2 * LONGEST, stop_ids=[STOP], names=names)

    together, clear = ours(list(range(PROMPTS))), 0
    for i, answer in enumerate(together):
        written = answer if len(answer) == NEW else [*answer, STOP]
        for token, (best, lead) in zip(written, owners_choices(model, asked.owner_inputs(i, answer), len(answer)), strict=False):
            if lead <= TIE:
                break  # from here on, both ways are right
            assert token == best, i
        else:
            clear += 1
            assert i % 5 or ours([i])[0] == answer
    assert clear >= PROMPTS - 4
    assert len({tuple(answer) for answer in together}) > PROMPTS // 5
