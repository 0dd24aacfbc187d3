"""Numbers of frames against NeMo's, in every numeric type, and the place of an utterance in the flat row."""

import numpy as np
import pytest
import torch

from model.lengths import FRAME_SAMPLES, WINDOW_REACH_SAMPLES, encoder_frames, mel_frames, slot_frames
from tests.goldens import perception
from tests.parity import nemo


@pytest.mark.parametrize("name", nemo.COUNTS)
def test_frame_counts_are_those_of_nemo_for_every_length(name):
    assert perception.facts()["longest"] == 200_000
    assert not nemo.differing_lengths(name)


def test_nothing_has_no_frames():
    assert (mel_frames(0), encoder_frames(0)) == (0, 0)
    assert encoder_frames(np.array([0, 159])).tolist() == encoder_frames(torch.tensor([0, 159])).tolist() == [0, 0]


def test_a_place_holds_a_masked_frame_and_the_windows_reach_and_no_more():
    def fits(samples: int, frames: int) -> bool:
        return frames > encoder_frames(samples) and frames * FRAME_SAMPLES >= samples + WINDOW_REACH_SAMPLES

    for samples in [*range(0, 4001), 159_999, 160_000, 160_001, 480_123]:
        assert fits(samples, slot_frames(samples)), samples
        assert not fits(samples, slot_frames(samples) - 1), samples
