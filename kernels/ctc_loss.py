"""Connectionist temporal classification: minus the log-probability of all alignments of labels to frames, of many utterances at once.

States of an utterance with labels l1 ... ln are blank, l1, blank, l2, ..., ln, blank. Its scores are log-probabilities of these alone, so
the size of the vocabulary plays no part, and nothing depends on a length that the host would have to know.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.activation import widen


def ctc_loss(label_scores_ULS: Tensor, blank_scores_UL: Tensor, labels_US: Tensor, lengths_U: Tensor, label_lengths_U: Tensor, *,
             implementation: str = "auto") -> Tensor:
    """Losses [U]; zero and without gradient where no alignment exists (too few frames for the labels).

    :param label_scores_ULS: log-probability of the utterance's label s at frame l
    :param blank_scores_UL: log-probability of the blank
    :param labels_US: which label it is; only whether neighbours are equal matters
    :param lengths_U: frames of each utterance, at most L
    :param label_lengths_U: labels of each utterance, at most S
    :param implementation: auto | a key of IMPLEMENTATIONS
    """
    run = IMPLEMENTATIONS["scan" if implementation == "auto" else implementation]
    return run(label_scores_ULS, blank_scores_UL, labels_US, lengths_U, label_lengths_U)


def ctc_loss_reference(label_scores_ULS: Tensor, blank_scores_UL: Tensor, labels_US: Tensor, lengths_U: Tensor,
                       label_lengths_U: Tensor) -> Tensor:
    """One utterance at a time: the distribution over states times a matrix of allowed moves, frame by frame."""
    losses = []
    for u, (length, count) in enumerate(zip(lengths_U.tolist(), label_lengths_U.tolist(), strict=True)):
        emitted = blank_scores_UL[u, :length, None].repeat(1, 2 * count + 1)
        emitted[:, 1::2] = label_scores_ULS[u, :length, :count]
        moves = torch.ones(2 * count + 1, 2 * count + 1, dtype=emitted.dtype).triu().tril(1)  # stay or go to the next state
        for k in range(1, count):
            moves[2 * k - 1, 2 * k + 1] = float(labels_US[u, k] != labels_US[u, k - 1])
        states = torch.zeros(2 * count + 1, dtype=emitted.dtype)
        states[:2] = 1  # an alignment begins with the first blank or the first label
        loss = emitted.new_zeros(())
        for frame in range(length):
            states = (states if frame == 0 else states @ moves) * emitted[frame].exp()
            loss = loss - states.sum().log()
            states = states / states.sum()
        ended = states[-2:].sum() if length > 0 else torch.tensor(float(count == 0))
        losses.append(loss - ended.log() if ended > 0 else emitted.new_zeros(()))
    return torch.stack(losses)


def _scan(label_scores_ULS: Tensor, blank_scores_UL: Tensor, labels_US: Tensor, lengths_U: Tensor, label_lengths_U: Tensor) -> Tensor:
    return ctc(widen(label_scores_ULS), widen(blank_scores_UL), labels_US, lengths_U, label_lengths_U)[0]


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {"reference": ctc_loss_reference, "scan": _scan}


@torch.library.custom_op("reedling::ctc", mutates_args=())
def ctc(label_scores_ULS: Tensor, blank_scores_UL: Tensor, labels_US: Tensor, lengths_U: Tensor,
        label_lengths_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [U] and their gradients by label and blank scores, from the recursions over frames forward and backward in time."""
    utterance = torch.arange(len(lengths_U), device=lengths_U.device)
    frame = torch.arange(blank_scores_UL.shape[1], device=lengths_U.device)[:, None]
    state = torch.arange(2 * labels_US.shape[1] + 1, device=lengths_U.device)
    emitted_LUN = blank_scores_UL.T[:, :, None].repeat(1, 1, len(state))
    emitted_LUN[:, :, 1::2] = label_scores_ULS.transpose(0, 1)
    # Backward in time is forward over the mirrored utterance, so both go through one loop.
    mirror_LU = (lengths_U - 1 - frame).clamp(min=0)
    mirror_UN = (2 * label_lengths_U[:, None] - state).clamp(min=0)
    mirrored_LUN = emitted_LUN[mirror_LU[:, :, None], utterance[:, None], mirror_UN]
    mirrored_US = labels_US.gather(1, (label_lengths_U[:, None] - 1 - state[: labels_US.shape[1]]).clamp(min=0))
    sums = _prefix_sums(torch.cat((emitted_LUN, mirrored_LUN), 1), _skips(torch.cat((labels_US, mirrored_US)), emitted_LUN.dtype))
    prefix, suffix = sums.chunk(2, 1)  # [L + 1, U, 2 + N]

    last_UN = prefix[lengths_U, utterance]
    ends_U2 = 2 * label_lengths_U[:, None] + torch.arange(1, 3, device=lengths_U.device)
    total_U = last_UN.gather(1, ends_U2).logsumexp(1)
    after_LU = (lengths_U - frame).clamp(min=0)
    through_LUN = prefix[1:, :, 2:] + suffix[after_LU[:, :, None], utterance[:, None], 2 + mirror_UN] - emitted_LUN
    exists = (frame < lengths_U)[:, :, None] & (state <= 2 * label_lengths_U[:, None]) & total_U.isfinite()[:, None]
    occupied_LUN = torch.where(exists, through_LUN - total_U[:, None], -torch.inf).exp()
    losses_U = torch.where(total_U.isfinite(), -total_U, 0)
    return losses_U, -occupied_LUN[:, :, 1::2].transpose(0, 1).contiguous(), -occupied_LUN[:, :, ::2].sum(2).T.contiguous()


def _skips(labels_US: Tensor, dtype: torch.dtype) -> Tensor:
    """[U, N]: 0 for states that may follow the state before the last, minus infinity for the others.

    These are labels whose predecessor differs; the first label may, as an alignment can begin with it.
    """
    skips = labels_US.new_full((labels_US.shape[0], 2 * labels_US.shape[1] + 1), -torch.inf, dtype=dtype)
    skips[:, 1:2] = 0
    skips[:, 3::2].masked_fill_(labels_US[:, 1:] != labels_US[:, :-1], 0)
    return skips


def _prefix_sums(emitted_LUN: Tensor, skips_UN: Tensor) -> Tensor:
    """[L + 1, U, 2 + N]: log-probability of being in a state after so many frames; two impossible states come first."""
    frames, utterances, states = emitted_LUN.shape
    sums = emitted_LUN.new_full((frames + 1, utterances, 2 + states), -torch.inf)
    sums[0, :, 1] = 0  # every alignment begins before the first state
    for before, after, emitted in zip(sums, sums[1:], emitted_LUN, strict=False):
        reached = torch.logaddexp(torch.logaddexp(before[:, 2:], before[:, 1:-1]), before[:, :-2] + skips_UN)
        torch.add(reached, emitted, out=after[:, 2:])
    return sums


@ctc.register_fake
def _(label_scores_ULS: Tensor, blank_scores_UL: Tensor, labels_US: Tensor, lengths_U: Tensor,
      label_lengths_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return blank_scores_UL.new_empty(len(lengths_U)), label_scores_ULS.new_empty(label_scores_ULS.shape), \
        blank_scores_UL.new_empty(blank_scores_UL.shape)


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, d_losses_U: Tensor, *_: Tensor) -> Any:
    by_label, by_blank = ctx.saved_tensors
    return by_label * d_losses_U[:, None, None], by_blank * d_losses_U[:, None], None, None, None


ctc.register_autograd(_backward, setup_context=_save)
