"""CTC: the reference against all alignments one by one, the scan against the reference and against torch's loss."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ctc_loss import ctc, ctc_loss

BLANK = 4
LENGTHS, LABEL_LENGTHS = [12, 9, 10, 6, 0, 0, 3, 1, 5], [4, 3, 0, 4, 0, 2, 4, 1, 3]
LABELS = [[1, 1, 1, 0], [0, 1, 2, 9], [9, 9, 9, 9], [1, 0, 1, 1], [0, 0, 0, 0], [1, 2, 0, 0], [0, 1, 0, 1], [3, 9, 9, 9], [2, 2, 2, 9]]
BOUNDS = torch.tensor(LABELS), torch.tensor(LENGTHS), torch.tensor(LABEL_LENGTHS)
POSSIBLE = [1, 1, 1, 1, 1, 0, 0, 1, 1]  # none: labels without frames; four labels in three frames


def scores(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels [U, L, S] and blank [U, L]; not of one distribution, which the loss must not rely on."""
    return -3 * torch.rand(len(LENGTHS), max(LENGTHS), 4, dtype=dtype), -3 * torch.rand(len(LENGTHS), max(LENGTHS), dtype=dtype)


def results(implementation: str, by_label: Tensor, by_blank: Tensor, probe: Tensor, bounds=BOUNDS) -> tuple[Tensor, ...]:
    leaves = by_label.detach().requires_grad_(), by_blank.detach().requires_grad_()
    losses = ctc_loss(*leaves, *bounds, implementation=implementation)
    return losses.detach(), *torch.autograd.grad((losses * probe).sum(), leaves)


def test_reference_is_the_sum_over_all_alignments():
    """Every sequence over {blank, label 0, 1, ...} whose merged, blank-free form is the labels."""
    by_label, by_blank = scores()
    for labels in ([0, 1], [2, 2], [1], []):
        bounds = torch.tensor([[*labels, 0, 0, 0, 0][:4]]), torch.tensor([5]), torch.tensor([len(labels)])
        total = 0.0
        for alignment in itertools.product(range(-1, len(labels)), repeat=5):
            merged = [s for s, _ in itertools.groupby(alignment) if s >= 0]
            steps = [labels[a] == labels[b] for a, b in itertools.pairwise(alignment) if a >= 0 and b >= 0 and a != b]
            if merged == list(range(len(labels))) and not any(steps):
                total += math.exp(sum(float(by_blank[0, t] if s < 0 else by_label[0, t, s]) for t, s in enumerate(alignment)))
        loss = ctc_loss(by_label[:1, :5], by_blank[:1, :5], *bounds, implementation="reference")
        assert float(loss) == pytest.approx(-math.log(total), rel=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_scan_matches_the_reference(dtype, tolerance):
    by_label, by_blank = scores()
    probe = torch.randn(len(LENGTHS), dtype=torch.float64)
    expected = results("reference", by_label, by_blank, probe)
    got = results("scan", by_label.to(dtype), by_blank.to(dtype), probe.to(dtype))
    for value, reference in zip(got, expected, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), reference, rtol=tolerance, atol=tolerance)
    assert [loss != 0 for loss in got[0].tolist()] == [bool(p) and length > 0 for p, length in zip(POSSIBLE, LENGTHS, strict=True)]
    impossible = ~torch.tensor(POSSIBLE, dtype=torch.bool)
    assert not got[1][impossible].any()
    assert not got[2][impossible].any()


def test_scan_is_torchs_loss_and_gradient():
    logits = torch.randn(max(LENGTHS), len(LENGTHS), BLANK + 1, dtype=torch.float64, requires_grad=True)
    labels = BOUNDS[0].clamp(max=BLANK - 1)
    theirs = F.ctc_loss(logits.log_softmax(2), labels, *BOUNDS[1:], blank=BLANK, reduction="none", zero_infinity=True)
    log_probs = logits.log_softmax(2).transpose(0, 1)
    by_label = log_probs.gather(2, labels[:, None].expand(-1, max(LENGTHS), -1))
    ours = ctc_loss(by_label, log_probs[:, :, BLANK], labels, *BOUNDS[1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(ours)
    expected, got = (torch.autograd.grad((losses * probe).sum(), logits, retain_graph=True)[0] for losses in (theirs, ours))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_long_utterances_stay_accurate_in_fp32():
    frames, count = 600, 150
    bounds = torch.randint(0, 20, (1, count)), torch.tensor([frames]), torch.tensor([count])
    by_label, by_blank = -6 * torch.rand(1, frames, count, dtype=torch.float64), -6 * torch.rand(1, frames, dtype=torch.float64)
    probe = torch.ones(1, dtype=torch.float64)
    expected = results("reference", by_label, by_blank, probe, bounds)
    got = results("scan", by_label.float(), by_blank.float(), probe.float(), bounds)
    for value, reference in zip(got, expected, strict=True):
        assert float((value.double() - reference).norm()) < 1e-3 * float(reference.norm())


def test_operator_keeps_the_compilers_contract():
    leaves = [t.requires_grad_() for t in scores(torch.float32)]
    torch.library.opcheck(ctc, (*leaves, *BOUNDS))
