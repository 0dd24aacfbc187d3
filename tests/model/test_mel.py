"""Log-mel features against NeMo's and against a plain fp64 transform of each utterance alone."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from configs.schema import EncoderConfig
from model.mel import log_mel, mel_filterbank
from tests.goldens import perception
from tests.model.rows import audio_row, cut_mel
from tests.parity import nemo

CPU = torch.device("cpu")
MEL = EncoderConfig(mel_bins=40)


def alone(wave: Tensor, mel_bins: int) -> Tensor:
    """Features [frames, mel_bins] of one utterance in fp64, from the library's short-time transform."""
    wave = wave.double()
    emphasised = torch.cat((wave[:1], wave[1:] - 0.97 * wave[:-1]))
    window = torch.hann_window(400, periodic=False, dtype=torch.float64)
    spectrum = torch.stft(emphasised, 512, 160, 400, window, center=True, pad_mode="constant", return_complex=True)
    frames = len(wave) // 160
    mel = torch.log(mel_filterbank(mel_bins, CPU, dtype=torch.float64) @ spectrum.abs().square() + 2**-24)[:, :frames].T
    std = mel.std(0) if frames > 1 else torch.zeros(mel_bins, dtype=torch.float64)
    return (mel - mel.mean(0)) / (std + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_features_are_those_of_nemo(dtype):
    """The recorded ones are fp32: in the quietest bins, whose power is what the transform rounds, they are up to 1e-4 from the exact ones,
    and how far ours are from them depends on the processor. Elsewhere they agree to the last digits."""
    mel, ctx = nemo.row(dtype)
    assert mel.shape == (8 * len(ctx.audio_segments_A), 128)
    assert mel.dtype == dtype
    assert [len(piece) for piece in cut_mel(mel, ctx)] == [*perception.facts()["mel_length"], 0, 0]
    ours, golden = nemo.features(dtype)
    errors = (ours - golden).abs()
    assert float(errors.square().mean().sqrt()) < 3e-6
    assert float((errors > 1e-5).double().mean()) < 0.01
    assert float(errors.max()) < 2e-4


def test_filterbank_is_that_of_nemo():
    torch.testing.assert_close(mel_filterbank(128, CPU), perception.tensors()["filterbank"], rtol=1e-6, atol=1e-9)


def test_filterbank_of_any_size_is_triangles_on_slaneys_scale():
    def hz(mel: float) -> float:
        return 200 / 3 * mel if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    top = 15 + 27 * math.log(8) / math.log(6.4)
    edges = [hz(top * i / 81) for i in range(82)]
    ours = mel_filterbank(80, CPU).double()
    for m in range(80):
        low, centre, high = edges[m : m + 3]
        for k in range(257):
            f = 31.25 * k
            height = (f - low) / (centre - low) if f <= centre else (high - f) / (high - centre)
            assert float(ours[m, k]) == pytest.approx(max(height, 0) * 2 / (high - low), abs=1e-8)


SAMPLES = [160, 161, 319, 320, 400, 1, 0, 159, 1279, 1280, 1281, 8 * 160 - 1, 2 * 1280 - 256, 2 * 1280 - 255, 5000]


@pytest.mark.parametrize("order", [SAMPLES, SAMPLES[::-1], sorted(SAMPLES)], ids=["mixed", "reversed", "sorted"])
def test_row_gives_each_utterance_its_own_features(order):
    waves = [torch.randn(samples) + 0.3 for samples in order]
    audio_S, ctx = audio_row(waves, MEL, gaps=[u % 3 for u in range(len(waves))], unused=1, tail=2)
    for wave, piece in zip(waves, cut_mel(log_mel(audio_S, ctx), ctx), strict=False):
        if len(piece):
            torch.testing.assert_close(piece.double(), alone(wave, 40), rtol=0, atol=5e-5)
    wide = cut_mel(log_mel(audio_S, dataclasses.replace(ctx, dtype=torch.float64)), ctx)
    for wave, piece in zip(waves, wide, strict=False):
        if len(piece):
            torch.testing.assert_close(piece, alone(wave, 40), rtol=0, atol=1e-9)


def test_one_frame_becomes_zeros():
    audio_S, ctx = audio_row([torch.randn(200), torch.randn(2000)], MEL)
    first, second = cut_mel(log_mel(audio_S, ctx), ctx)
    assert first.shape == (1, 40)
    assert not first.any()
    torch.testing.assert_close(second.var(0), torch.ones(40), rtol=1e-4, atol=0)


def test_an_utterance_moves_no_other():
    waves = [torch.randn(3000), torch.randn(4000), torch.randn(2000)]
    before, ctx = audio_row(waves, MEL)
    after, _ = audio_row([waves[0], 100 * torch.randn(4000), waves[2]], MEL)
    one, two = (cut_mel(log_mel(audio_S, ctx), ctx) for audio_S in (before, after))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[2], two[2])
    assert not torch.equal(one[1], two[1])


def test_silence_stays_small():
    audio_S, ctx = audio_row([torch.zeros(3000), torch.randn(1000)], MEL)
    assert float(cut_mel(log_mel(audio_S, ctx), ctx)[0].abs().max()) < 1  # rounding of the mean over the guard of the deviation


def test_row_of_nothing_is_zeros():
    audio_S, ctx = audio_row([torch.zeros(0)], MEL, tail=4)
    assert not log_mel(audio_S, ctx).any()


def test_features_are_fp32_whatever_the_compute_dtype():
    audio_S, ctx = audio_row([torch.randn(5000)], MEL)
    half = log_mel(audio_S, dataclasses.replace(ctx, dtype=torch.bfloat16))
    assert half.dtype == torch.float32
    assert torch.equal(half, log_mel(audio_S, ctx))
