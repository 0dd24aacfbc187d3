"""Samples -> mel frames -> encoder frames (= audio tokens): the one place that counts them.

All functions take ints, NumPy arrays or integer tensors. NeMo's FastConformer: hop 160 samples at 16 kHz, then three convolutions of
stride 2, kernel 3, padding 1.
"""

from typing import TypeVar

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


def slot_frames(samples: int) -> int:
    """Encoder frames that an utterance takes in the flat audio row.

    At least one masked frame follows each utterance, so that no convolution or window reaches from one into the next; then the flat
    row gives each utterance exactly what it would get alone.
    """
    return max(encoder_frames(samples) + 1, -(-(samples + WINDOW_REACH_SAMPLES) // FRAME_SAMPLES))
