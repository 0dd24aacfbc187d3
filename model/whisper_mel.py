"""Log-mel features of the flat audio row as Whisper makes them, in fp32 or, for a model in fp64, in that.

The window is centred, what it sees before an utterance is the utterance's beginning mirrored, and behind it silence; the owners append that
silence up to 30 seconds, so the numbers are theirs for every utterance that is shorter.
"""

import torch
from torch import Tensor

from kernels.inductor import stored
from kernels.linear import linear
from model.audio_row import slot_positions, spread, valid_slots
from model.context import Context
from model.lengths import COUNTING, HOP_SAMPLES
from model.mel import MEL_PER_FRAME, mel_filterbank

_FFT_SAMPLES = 400  # also the window
_FLOOR = 1e-10  # of the power
_RANGE = 8.0  # decades below an utterance's loudest bin that are kept


def log_mel(audio_S: Tensor, ctx: Context) -> Tensor:
    """Features [8 * A, M], fp32 or wider, of samples [1280 * A], zeros outside utterances."""
    power = torch.view_as_real(torch.fft.rfft(_windows(audio_S.to(torch.promote_types(ctx.dtype, torch.float32)), ctx))).square().sum(-1)
    loudness = linear(power, mel_filterbank(ctx.encoder.mel_bins, audio_S.device, _FFT_SAMPLES, power.dtype)).clamp(min=_FLOOR).log10()
    floor = spread(_loudest(loudness.amax(-1), ctx) - _RANGE, MEL_PER_FRAME, ctx)[:, None]
    real = valid_slots(COUNTING[ctx.encoder.kind].mel(ctx.audio_samples_U), MEL_PER_FRAME, ctx)[:, None]
    return torch.where(real, (torch.maximum(loudness, floor) + 4.0) / 4.0, 0.0)


def _windows(audio_S: Tensor, ctx: Context) -> Tensor:
    """[8 * A, 400]: the windowed samples around each frame."""
    position = slot_positions(MEL_PER_FRAME, ctx) * HOP_SAMPLES  # of the frame's centre in its utterance
    begin = torch.arange(len(position), device=audio_S.device) * HOP_SAMPLES - position  # of the utterance in the row
    offsets = torch.arange(_FFT_SAMPLES, device=audio_S.device) - _FFT_SAMPLES // 2
    sample = (position[:, None] + offsets).abs()  # mirrored before the first
    sounding = sample < spread(ctx.audio_samples_U, MEL_PER_FRAME, ctx)[:, None]
    window = stored(torch.hann_window(_FFT_SAMPLES, dtype=audio_S.dtype, device=audio_S.device))
    return torch.where(sounding, audio_S[(begin[:, None] + sample).clamp(max=len(audio_S) - 1)], 0.0) * window


def _loudest(frames: Tensor, ctx: Context) -> Tensor:
    """The largest value of each utterance's place [U]; 0 where it has none."""
    utterances = torch.arange(len(ctx.audio_starts_U), device=frames.device)
    member_UA = utterances[:, None] == ctx.audio_segments_A.repeat_interleave(MEL_PER_FRAME)
    loudest_U = torch.where(member_UA, frames, -torch.inf).amax(1)
    return torch.where(loudest_U.isfinite(), loudest_U, 0.0)
