"""Padding and unpadding against loops over utterances, also backward."""

import pytest
import torch
from torch import Tensor

from kernels import ragged

STARTS, LENGTHS, FRAMES = [0, 4, 0, 5, 9], [3, 1, 0, 3, 5], 5  # the third utterance is unused; frames 8 and 14, 15 belong to none
SEGMENTS = [0, 0, 0, 0, 1, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5]
POSITIONS = [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
LAYOUT = ragged.Layout(torch.tensor(STARTS), torch.tensor(LENGTHS), torch.tensor(SEGMENTS), torch.tensor(POSITIONS), FRAMES)


def padded(x: Tensor) -> Tensor:
    out = torch.zeros(len(STARTS), FRAMES, *x.shape[1:], dtype=x.dtype)
    for u, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        out[u, :length] = x[start : start + length]
    return out


def unpadded(x: Tensor) -> Tensor:
    out = torch.zeros(len(SEGMENTS), *x.shape[2:], dtype=x.dtype)
    for u, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        out[start : start + length] = x[u, :length]
    return out


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)], ids=str)
def test_both_directions_are_loops_over_utterances(trailing):
    flat, wide = torch.randn(len(SEGMENTS), *trailing, requires_grad=True), torch.randn(len(STARTS), FRAMES, *trailing, requires_grad=True)
    out = ragged.pad(flat, LAYOUT)
    back = ragged.unpad(wide, LAYOUT)
    assert torch.equal(out, padded(flat))
    assert torch.equal(back, unpadded(wide))
    # each is the other's transpose
    assert torch.equal(torch.autograd.grad(out, flat, wide.detach())[0], unpadded(wide))
    assert torch.equal(torch.autograd.grad(back, wide, flat.detach())[0], padded(flat))


def test_what_lies_between_utterances_may_be_anything():
    flat = torch.full((len(SEGMENTS), 2), torch.nan)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        flat[start : start + length] = 1.0
    out = ragged.pad(flat, LAYOUT)
    assert float(out.sum()) == 2 * sum(LENGTHS)
    assert float(ragged.unpad(out, LAYOUT).sum()) == 2 * sum(LENGTHS)
