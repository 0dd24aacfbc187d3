"""Fifty prompts at once against the owner and against one by one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from configs.schema import CompileConfig, Config
from model import speech_lm
from model.context import Context
from model.hub.load import load
from parallel.gather import Reshard
from tests.model.token_rows import token_row
from tests.parity import owners, results, speech
from tests.parity.check import SPEECH
from training.engine import Engine
from training.generation import Weights, generate
from training.step import Batch

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


@dataclass(frozen=True)
class Answered:
    """How the answers to PROMPTS prompts compare."""

    clear: int  # prompts of which no two best logits are within TIE on the way
    differing: tuple[int, ...]  # prompts whose tokens are not the owner's or not those without the others, before any such tie
    distinct: int  # answers


def compare(transformers: Any, name: str, folder: Path, every: int = 1) -> Answered:
    """All prompts at once against the owner, and every so many of them against the same alone."""
    model = speech.make_glm_asr(transformers) if name == SPEECH else owners.make(transformers, name)
    model.save_pretrained(folder)
    mesh = results.single_mesh()
    loaded = load(folder, mesh)
    cfg = Config(model=loaded.cfg)
    cfg.generation.max_new_tokens, cfg.train.ctc_weight = NEW, 0
    engine = Engine(speech_lm.spec(cfg), speech_lm.units(cfg), mesh, torch.float32, Reshard(), CompileConfig(enabled=False))
    weights, asked = Weights(cfg, mesh, engine, results.leaves(loaded)), requests(name == SPEECH)

    def ours(some: list[int]) -> list[list[int]]:
        batch, context = asked.row(cfg.model, some)
        context, names = replace(context, training=False), [str(i) for i in some]
        with mock.patch.dict(speech_lm.FEATURES, glm_asr=lambda mel_AM, ctx: mel_AM):
            found = generate(weights, batch, context, longest=2 * LONGEST, stop_ids=[STOP], names=names)
        return [answer if len(answer) == NEW else [*answer, STOP] for answer in found]

    together, clear, differing = ours(list(range(PROMPTS))), 0, []
    for i, answer in enumerate(together):
        choices = list(owners_choices(model, asked.owner_inputs(i, answer[:-1]), len(answer) - 1))
        # from the first tie on, both ways are right
        decided = next((n for n, (_, lead) in enumerate(choices) if lead <= TIE), NEW)
        clear += decided >= len(answer)
        others = [[best for best, _ in choices], *(ours([i]) if i % every == 0 else [])]
        if any(other[:decided] != answer[:decided] for other in others):
            differing.append(i)
    return Answered(clear, tuple(differing), len({tuple(answer) for answer in together}))
