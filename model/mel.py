"""Normalised log-mel features of the flat audio row: NeMo's AudioToMelSpectrogramPreprocessor, in fp32 or, for a model in fp64, in that.

Zeros stand between the utterances, as beyond the ends of a recording, so one transform of the row is exact for each.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.inductor import stored
from kernels.linear import linear
from model.audio_row import slot_positions, spread, valid_slots
from model.context import Context
from model.lengths import FRAME_SAMPLES, HOP_SAMPLES, mel_frames

SAMPLE_RATE = 16000
MEL_PER_FRAME = FRAME_SAMPLES // HOP_SAMPLES
_WINDOW_SAMPLES = 400
_FFT_SAMPLES = 512
_PREEMPHASIS = 0.97
_LOG_GUARD = 2.0**-24
_STD_GUARD = 1e-5


def log_mel(audio_S: Tensor, ctx: Context) -> Tensor:
    """Features [8 * A, M], fp32 or wider, of samples [1280 * A]: mean 0 and std 1 a bin over each utterance's frames, zeros elsewhere."""
    power = _power_spectrum(audio_S.to(torch.promote_types(ctx.dtype, torch.float32)), ctx)
    mel = torch.log(linear(power, mel_filterbank(ctx.encoder.mel_bins, audio_S.device, dtype=power.dtype)) + _LOG_GUARD)
    return _normalise(mel, ctx)


def _power_spectrum(audio_S: Tensor, ctx: Context) -> Tensor:
    """[frames, 257] of the pre-emphasised row; frame f is centred at sample 160 f of the row, its window in the transform's middle."""
    half, device = _FFT_SAMPLES // 2, audio_S.device
    frames = F.pad(audio_S, (half + 1, half - HOP_SAMPLES)).unfold(0, _FFT_SAMPLES + 1, HOP_SAMPLES)
    # Silence ends each utterance, but pre-emphasis would turn the step down to it into a click: nothing sounds beyond the last sample.
    starts = slot_positions(MEL_PER_FRAME, ctx) * HOP_SAMPLES - half
    sounding = starts[:, None] + torch.arange(_FFT_SAMPLES, device=device) < spread(ctx.audio_samples_U, MEL_PER_FRAME, ctx)[:, None]
    emphasised = torch.where(sounding, frames[:, 1:] - _PREEMPHASIS * frames[:, :-1], 0.0)
    margin = (_FFT_SAMPLES - _WINDOW_SAMPLES) // 2
    window = stored(F.pad(torch.hann_window(_WINDOW_SAMPLES, periodic=False, dtype=audio_S.dtype, device=device), (margin, margin)))
    return torch.view_as_real(torch.fft.rfft(emphasised * window)).square().sum(-1)


def mel_filterbank(mel_bins: int, device: torch.device, fft_samples: int = _FFT_SAMPLES, dtype: torch.dtype = torch.float32) -> Tensor:
    """[mel_bins, fft_samples / 2 + 1]: triangles of unit area (in Hz) between 0 and 8 kHz, equally spaced on Slaney's scale."""
    top = _slaney_mel(SAMPLE_RATE / 2)
    edges = _slaney_hz(torch.linspace(0.0, top, mel_bins + 2, dtype=torch.float64, device=device))
    bins = torch.arange(fft_samples // 2 + 1, dtype=torch.float64, device=device) * (SAMPLE_RATE / fft_samples)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp(min=0.0)
    return (triangles * (2.0 / (high - low))).to(dtype)


def _slaney_mel(hz: float) -> float:
    """Above 1 kHz: 15 mel there, then 27 / ln 6.4 mel a factor of e."""
    return 15.0 + 27.0 / math.log(6.4) * math.log(hz / 1000.0)


def _slaney_hz(mel: Tensor) -> Tensor:
    """Inverse of Slaney's scale, which is linear below 1 kHz (200 / 3 Hz a mel) and logarithmic above."""
    return torch.where(mel < 15.0, mel * (200.0 / 3.0), 1000.0 * torch.exp((mel - 15.0) * (math.log(6.4) / 27.0)))


def _normalise(mel: Tensor, ctx: Context) -> Tensor:
    lengths_U = mel_frames(ctx.audio_samples_U)
    real = valid_slots(lengths_U, MEL_PER_FRAME, ctx)[:, None]
    mean = _utterance_sums(torch.where(real, mel, 0.0), ctx) / lengths_U.clamp(min=1)[:, None]
    centred = torch.where(real, mel - spread(mean.to(mel.dtype), MEL_PER_FRAME, ctx), 0.0)
    # Unbiased; an utterance of one frame has no deviation, and becomes zeros.
    variance = _utterance_sums(centred.square(), ctx) / (lengths_U - 1).clamp(min=1)[:, None]
    return centred * spread((1 / (variance.sqrt() + _STD_GUARD)).to(mel.dtype), MEL_PER_FRAME, ctx)


def _utterance_sums(x: Tensor, ctx: Context) -> Tensor:
    """fp64 [U, M] sums over each utterance; a product with a 0/1 matrix: the same order every time, and no reduced-precision mode."""
    utterances = torch.arange(ctx.audio_starts_U.shape[0], device=x.device)
    member_UA = (utterances[:, None] == ctx.audio_segments_A).double()
    return member_UA @ x.unflatten(0, (-1, MEL_PER_FRAME)).sum(1).double()
