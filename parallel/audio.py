"""The audio side of a row: each of the ranks that share the row encodes the utterances that begin in its equal part of the frames.

They lie in a window of static length, which reaches beyond that part by the longest utterance; a rank may have none. Encoder, projector and
CTC head see nothing but the window. The projected frames are gathered, window after window, where the token row takes them.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from model.context import Context
from model.lengths import COUNTING, FRAME_SAMPLES
from parallel.collectives import all_gather_grad

FIELDS = ("audio_starts_U", "audio_samples_U", "audio_lengths_U", "audio_segments_A", "audio_positions_A")


def window_frames(ctx: Context, ranks: int) -> int:
    """Row frames of a rank's window: its part, and what the last utterance that begins there may need beyond."""
    whole = len(ctx.audio_segments_A)
    place = max(ctx.utterance_frames + 1, COUNTING[ctx.encoder.kind].slots(1))  # the longest, gap included
    return min(whole, -(-whole // ranks) + place - 1)


def own_utterances(row: dict[str, Tensor], ctx: Context, ranks: int, rank: int) -> dict[str, Tensor]:
    """`row` with the samples and the audio FIELDS of this rank's window, where other ranks' utterances have no frame, and with frames_T
    counting the frames (or queries) of all windows, one after the other."""
    whole, window = len(ctx.audio_segments_A), window_frames(ctx, ranks)
    part, utterances = -(-whole // ranks), len(ctx.audio_starts_U)
    frames_A = torch.arange(whole, device=ctx.audio_segments_A.device)
    owners_A = torch.where(ctx.audio_segments_A < utterances, (frames_A - ctx.audio_positions_A) // part, ranks)
    own_RA = owners_A == torch.arange(ranks, device=frames_A.device)[:, None]
    firsts_R = torch.where(own_RA, frames_A, whole).amin(1)
    place_A = firsts_R[rank] + frames_A[:window]
    here_A = (place_A < whole) & own_RA[rank][place_A.clamp(max=whole - 1)]
    place_A = torch.where(here_A, place_A, 0)
    owned_U = ctx.audio_starts_U // part == rank
    samples_AS = row["audio_S"].unflatten(0, (whole, FRAME_SAMPLES))[place_A]
    taken_T = row["frames_T"].clamp(min=0)
    if queries := ctx.projector.qformer.queries:  # every rank has a place for those of all utterances
        frames_T = ctx.audio_starts_U[taken_T // queries] // part * (utterances * queries) + taken_T
    else:
        owners_T = owners_A[taken_T].clamp(max=ranks - 1)
        frames_T = owners_T * window + taken_T - firsts_R[owners_T]
    return row | {
        "audio_S": torch.where(here_A[:, None], samples_AS, 0).flatten(),
        "audio_starts_U": torch.where(owned_U, ctx.audio_starts_U - firsts_R[rank], 0).clamp(min=0),
        "audio_samples_U": torch.where(owned_U, ctx.audio_samples_U, 0),
        "audio_lengths_U": torch.where(owned_U, ctx.audio_lengths_U, 0),
        "audio_segments_A": torch.where(here_A, ctx.audio_segments_A[place_A], utterances),
        "audio_positions_A": torch.where(here_A, ctx.audio_positions_A[place_A], 0),
        "frames_T": torch.where(row["frames_T"] < 0, -1, frames_T)}


def gather_frames(frames_AD: Tensor, ctx: Context) -> Tensor:
    """The frames of all windows, one after the other."""
    return frames_AD if ctx.split_group is None else all_gather_grad(frames_AD.contiguous(), ctx.split_group)


def moments(count: Tensor, mean_D: Tensor, squares_D: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and variance over the frames of all ranks of a group, from each one's number of frames, their mean and their summed squared
    distances from it."""
    if group is None:
        return mean_D, squares_D / count.clamp(min=1)
    parts = all_gather_grad(torch.cat((count[None], mean_D, squares_D))[None], group)
    counts_R1, means_RD, squares_RD = parts.split((1, len(mean_D), len(mean_D)), 1)
    total = counts_R1.sum().clamp(min=1)
    mean_D = (counts_R1 * means_RD).sum(0) / total
    return mean_D, (squares_RD + counts_R1 * (means_RD - mean_D).square()).sum(0) / total
