"""Samples -> mel frames -> encoder frames -> audio tokens: the one place that counts them.

All functions take ints, NumPy arrays or integer tensors. NeMo's FastConformer: hop 160 samples at 16 kHz, then three convolutions of
stride 2, kernel 3, padding 1; a frame is a token. Whisper's encoder: one convolution of stride 2; four frames are a token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

HOP_SAMPLES = 160  # 10 ms
FRAME_SAMPLES = 1280  # 80 ms, one encoder frame
WINDOW_REACH_SAMPLES = 256  # half of the 512-point transform: zeros needed beyond an utterance's last sample
FRAME_SEC = 0.08

Count = TypeVar("Count", int, np.ndarray, Tensor)


def mel_frames(samples: Count) -> Count:
    """Valid log-mel frames of an utterance."""
    return samples // HOP_SAMPLES


def encoder_frames(samples: Count) -> Count:
    """Valid encoder frames, which is the number of audio tokens of an utterance."""
    frames = mel_frames(samples)
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


WHISPER_FRAMES_PER_SLOT = 4  # of 20 ms
WHISPER_WINDOW_FRAMES = 3000  # log-mel frames, 30 s


def whisper_mel_frames(samples: Count) -> Count:
    """Log-mel frames of an utterance, of which the last may reach beyond its end."""
    return (samples + HOP_SAMPLES - 1) // HOP_SAMPLES


def whisper_window_frames(samples: Count) -> Count:
    """The same with the silence that is appended up to 30 seconds."""
    frames = whisper_mel_frames(samples)
    return frames + (WHISPER_WINDOW_FRAMES - frames) * ((frames > 0) & (frames < WHISPER_WINDOW_FRAMES))


def halved(mel: Count) -> Count:
    """Frames behind Whisper's second convolution, of stride 2."""
    return (mel + 1) // 2


def slot_frames(samples: int) -> int:
    """Encoder frames that an utterance takes in the flat audio row.

    At least one masked frame follows each utterance, so that no convolution or window reaches from one into the next; then the flat
    row gives each utterance exactly what it would get alone.
    """
    return max(encoder_frames(samples) + 1, -(-(samples + WINDOW_REACH_SAMPLES) // FRAME_SAMPLES))


def whisper_tokens(samples: Count) -> Count:
    """Audio tokens of an utterance: four frames each, a rest is left out, and so is silence."""
    return halved(whisper_mel_frames(samples)) // WHISPER_FRAMES_PER_SLOT


def whisper_slot_frames(mel: int) -> int:
    """Row frames of so many mel frames: two of silence follow, since the last windows still hear an utterance's end."""
    return -(-(mel + 2) // (2 * WHISPER_FRAMES_PER_SLOT))


class Counting(NamedTuple):
    """How an encoder counts."""

    tokens: Callable[[Any], Any]  # samples -> audio tokens, of any Count
    slots: Callable[[int], int]  # samples -> frames of the flat audio row
    mel: Callable[[Any], Any]  # samples -> log-mel frames that the encoder sees, of any Count
    frames_a_token: int  # and frames that the encoder makes of a frame of the row


_EXACT = Counting(whisper_tokens, lambda n: whisper_slot_frames(whisper_mel_frames(n)), whisper_mel_frames, WHISPER_FRAMES_PER_SLOT)
_WINDOW = Counting(whisper_tokens, lambda n: whisper_slot_frames(whisper_window_frames(n)), whisper_window_frames, WHISPER_FRAMES_PER_SLOT)
COUNTING = {"fastconformer": Counting(encoder_frames, slot_frames, mel_frames, 1),
            "whisper": _EXACT, "glm_asr": _EXACT, "whisper_30s": _WINDOW, "glm_asr_30s": _WINDOW,
            "none": Counting(lambda n: 0 * n, lambda n: 0, lambda n: 0 * n, 1)}
