"""Language models on a packed row of utterances, against the owner's class on one utterance at a time."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from model import decoder, speech_lm
from model.context import Context
from model.hub.load import Loaded
from tests.model.token_rows import token_row
from tests.parity import results
from tests.parity.owners import VOCAB
from tests.parity.results import Result, runner

LENGTHS = (24, 7, 41)  # tokens of the utterances, of which the first third is not supervised
PADDING = 9
PROMPT, GENERATED = torch.arange(3, 8)[None], 12


def utterances() -> list[tuple[Tensor, Tensor]]:
    """Token ids and labels (-100: not supervised; not shifted) of each utterance."""
    g = torch.Generator().manual_seed(0)
    found = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCAB, (length,), generator=g)
        labels = ids.clone()
        labels[: length // 3] = -100
        found.append((ids, labels))
    return found


def theirs(model: Any) -> Result:
    """The owner's model; its gradients stay in its parameters."""
    return results.theirs(model, [model(ids[None]).logits[0] for ids, _ in utterances()], [labels for _, labels in utterances()])


def ours(loaded: Loaded) -> Result:
    """All utterances in one packed row, with padding behind them."""
    weights = results.leaves(loaded)
    shifted = torch.cat([torch.cat([labels[1:], labels.new_tensor([-100])]) for _, labels in utterances()])
    batch = {"tokens_T": torch.cat([*(ids for ids, _ in utterances()), torch.zeros(PADDING, dtype=torch.int64)]),
             "labels_T": torch.cat([shifted, torch.full((PADDING,), -100)])}
    ctx = token_row(loaded.cfg.decoder, LENGTHS, PADDING)
    _, losses, _ = speech_lm.part(runner(loaded, weights, ctx), speech_lm.whole(loaded.cfg), None, batch, ctx, Config(model=loaded.cfg))
    return results.ours(logits(loaded, weights, batch["tokens_T"], ctx)[:-PADDING], losses["lm"] / (shifted != -100).sum(), weights)


def logits(loaded: Loaded, weights: dict[str, Tensor], tokens_T: Tensor, ctx: Context) -> Tensor:
    """fp32 logits of all slots."""
    run = runner(loaded, weights, ctx)
    x_TD = speech_lm.layers(run, speech_lm.embed(run, None, {"tokens_T": tokens_T}, ctx), ctx, {})
    return run(speech_lm.head_unit(loaded.cfg), decoder.logits, x_TD, torch.arange(len(tokens_T)))


def generate(model: Any) -> Tensor:
    """The tokens that the owner's model adds to the prompt."""
    return model.generate(PROMPT, max_new_tokens=GENERATED, do_sample=False)[0, PROMPT.shape[1] :]


def predict(loaded: Loaded, generated: Tensor) -> Tensor:
    """Our best token at each place of the generated text."""
    tokens = torch.cat([PROMPT[0], generated])[:-1]
    ctx = token_row(loaded.cfg.decoder, [len(tokens)])
    return logits(loaded, results.leaves(loaded), tokens, ctx)[PROMPT.shape[1] - 1 :].argmax(-1)
