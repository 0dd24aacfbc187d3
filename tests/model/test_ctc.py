"""The CTC head against torch's loss of each utterance alone, over rows with gaps, unused and impossible utterances; greedy decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import EncoderConfig
from model import ctc, params
from tests.model.rows import audio_row

D, VOCAB = 6, 7
LABEL_LENGTHS = [3, 2, 4, 0, 1, 0, 0]
LABELS = [[2, 2, 5, 1], [6, 0, 3, 3], [1, 2, 3, 4], [5, 5, 5, 5], [4, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def row():
    """Five utterances (the third too short for its labels, the fourth without labels) and two unused; frames beyond them are large."""
    _, ctx = audio_row([torch.zeros(1280 * n) for n in (7, 4, 3, 2, 1)], EncoderConfig(d_model=D), gaps=[0, 2, 0, 1, 0], unused=2, tail=3,
                       utterance_frames=9, dtype=torch.float64)
    assert ctx.audio_lengths_U.tolist() == [7, 4, 3, 2, 1, 0, 0]
    x = 50 * torch.randn(len(ctx.audio_segments_A), D, dtype=torch.float64)
    for start, length in zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True):
        x[start : start + length] = torch.randn(length, D, dtype=torch.float64)
    w = params.map_named(lambda path, p: torch.randn(p.shape, dtype=torch.float64).requires_grad_(), ctc.spec(D, VOCAB))
    return w, x.requires_grad_(), torch.tensor(LABELS), torch.tensor(LABEL_LENGTHS), ctx


def alone(w, x, ctx) -> Tensor:
    """Sum over utterances of torch's loss, blank last."""
    total = x.new_zeros(())
    for u, (start, length) in enumerate(zip(ctx.audio_starts_U.tolist(), ctx.audio_lengths_U.tolist(), strict=True)):
        if length > 0:
            log_probs = (x[start : start + length] @ w["weight"].T + w["bias"]).log_softmax(1)
            labels = torch.tensor(LABELS[u][: LABEL_LENGTHS[u]], dtype=torch.int64)
            total = total + F.ctc_loss(log_probs[:, None], labels[None], torch.tensor([length]), torch.tensor([len(labels)]), blank=VOCAB,
                                       reduction="sum", zero_infinity=True)
    return total


def test_loss_is_the_sum_of_torchs_losses_of_each_utterance():
    w, x, labels, lengths, ctx = row()
    ours, theirs = ctc.loss(w, x, labels, lengths, ctx), alone(w, x, ctx)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    leaves = [x, w["weight"], w["bias"]]
    for got, expected in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_loss_of_bf16_frames_is_summed_in_fp32():
    w, x, labels, lengths, ctx = row()
    half = {name: t.detach().bfloat16() for name, t in w.items()}
    loss = ctc.loss(half, x.detach().bfloat16(), labels, lengths, ctx)
    assert loss.dtype == torch.float32
    expected = ctc.loss({name: t.double() for name, t in half.items()}, x.detach().bfloat16().double(), labels, lengths, ctx)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)


def test_row_of_nothing_has_no_loss_and_no_gradient():
    _, ctx = audio_row([torch.zeros(0)], EncoderConfig(d_model=D), tail=3)
    w = params.map_named(lambda path, p: torch.randn(p.shape).requires_grad_(), ctc.spec(D, VOCAB))
    x = torch.randn(len(ctx.audio_segments_A), D, requires_grad=True)
    loss = ctc.loss(w, x, torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ctx)
    assert not loss.any()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, [x, *w.values()]))


def test_compiles_as_one_graph():
    w, x, labels, lengths, ctx = row()
    compiled = torch.compile(ctc.loss, fullgraph=True, backend="aot_eager")  # fusion is not what is in question
    expected, got = ctc.loss(w, x, labels, lengths, ctx), compiled(w, x, labels, lengths, ctx)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    leaves = [x, w["weight"], w["bias"]]
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_greedy_merges_repetitions_and_drops_blanks():
    _, ctx = audio_row([torch.zeros(1280 * 6), torch.zeros(1280 * 2), torch.zeros(1280 * 3)], EncoderConfig(d_model=VOCAB + 1), unused=1)
    x = torch.zeros(len(ctx.audio_segments_A), VOCAB + 1)
    best = {0: [3, 3, VOCAB, 3, 5, 5], 1: [VOCAB, VOCAB], 2: [5, 0, 5]}
    for u, ids in best.items():
        start = int(ctx.audio_starts_U[u])
        x[start + torch.arange(len(ids)), torch.tensor(ids)] = 1
    w = {"weight": torch.eye(VOCAB + 1), "bias": torch.zeros(VOCAB + 1)}
    assert ctc.greedy(w, x, ctx) == [[3, 3, 5], [], [5, 0, 5], []]


def test_the_blank_is_one_more_than_the_vocabulary():
    spec = ctc.spec(D, VOCAB)
    assert (spec["weight"].shape, spec["bias"].shape) == ((VOCAB + 1, D), (VOCAB + 1,))
    assert not spec["bias"].decay
