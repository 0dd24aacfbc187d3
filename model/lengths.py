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


def whisper_mel_frames(samples: Count) -> Count:
    """Log-mel frames of an utterance, of which the last may reach beyond its end."""
    return (samples + HOP_SAMPLES - 1) // HOP_SAMPLES


def whisper_frames(samples: Count) -> Count:
    """Frames behind Whisper's second convolution, of stride 2."""
    return (whisper_mel_frames(samples) + 1) // 2


def slot_frames(samples: int) -> int:
    """Encoder frames that an utterance takes in the flat audio row.

    At least one masked frame follows each utterance, so that no convolution or window reaches from one into the next; then the flat
    row gives each utterance exactly what it would get alone.
    """
    return max(encoder_frames(samples) + 1, -(-(samples + WINDOW_REACH_SAMPLES) // FRAME_SAMPLES))


def whisper_tokens(samples: Count) -> Count:
    """Audio tokens of an utterance: four frames each, a rest is left out."""
    return whisper_frames(samples) // WHISPER_FRAMES_PER_SLOT


def whisper_slot_frames(samples: int) -> int:
    """Row frames that an utterance takes: two mel frames of silence follow, since the last windows still hear its end."""
    return -(-(whisper_mel_frames(samples) + 2) // (2 * WHISPER_FRAMES_PER_SLOT))


class Counting(NamedTuple):
    """How an encoder counts."""

    tokens: Callable[[Any], Any]  # samples -> audio tokens, of any Count
    slots: Callable[[int], int]  # samples -> frames of the flat audio row
    frames_a_token: int  # and frames that the encoder makes of a frame of the row


_WHISPER = Counting(whisper_tokens, whisper_slot_frames, WHISPER_FRAMES_PER_SLOT)
COUNTING = {"fastconformer": Counting(encoder_frames, slot_frames, 1), "whisper": _WHISPER, "glm_asr": _WHISPER,
            "none": Counting(lambda samples: 0 * samples, lambda samples: 0, 1)}
