import os
from pathlib import Path

import numpy as np
import pytest
from lhotse import CutSet, Recording

from data.audio import count_samples, fit, read_audio, resample, whole_file
from data.errors import DataError, UtteranceError
from data.manifest import Segment, Utterance, read_manifest
from tests.data.files import RATE, noise, write_audio


def utterance(path: Path, duration_sec: float, offset_sec: float = 0.0) -> Utterance:
    return Utterance("call-7", "line 3 of x.jsonl", "text", duration_sec, Segment(str(path), offset_sec, duration_sec))


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """20 s whose sample number n has the value n / 2^20, exactly."""
    return write_audio(tmp_path_factory.mktemp("ramp") / "ramp.wav", np.arange(20 * RATE, dtype=np.float32) / 2**20, subtype="FLOAT")


def test_exactly_the_declared_samples_from_the_offset(ramp):
    rng = np.random.default_rng(0)
    for offset, duration in [(12.3, 4.948), (0.0, 20.0), *rng.uniform([0, 0.01], [15, 5], (20, 2)).round(4).tolist()]:
        audio = read_audio(utterance(ramp, duration, offset), RATE, "mean")
        assert audio.dtype == np.float32
        first = round(offset * RATE)
        assert (audio * 2**20).tolist() == list(range(first, first + round(duration * RATE)))


@pytest.mark.parametrize("to_rate", [8000, 22050, 24000])
def test_other_rates_are_resampled_after_cutting(ramp, to_rate):
    audio = read_audio(utterance(ramp, 1.0, 5.0), to_rate, "mean")
    assert len(audio) == to_rate
    inner = slice(to_rate // 10, -to_rate // 10)  # away from the ends of the piece, where the filter sees its edge
    expected = (5.0 + np.arange(to_rate) / to_rate) * RATE / 2**20
    assert np.abs(audio - expected)[inner].max() < 1e-3


def test_resampling_keeps_a_tone():
    tone = np.sin(2 * np.pi * 440 * np.arange(44100) / 44100).astype(np.float32)
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert np.abs(resample(tone, 44100, RATE) - expected)[200:-200].max() < 2e-3
    assert resample(tone, 44100, 44100) is tone


def test_offset_beyond_the_end(ramp):
    with pytest.raises(UtteranceError, match=rf"line 3 of x\.jsonl: offset 20\.0 s is beyond the end of {ramp} \(20\.000 s\) .*call-7"):
        read_audio(utterance(ramp, 1.0, 20.0), RATE, "mean")


def test_rounding_of_the_duration_is_filled_and_more_is_truncation(ramp):
    audio = read_audio(utterance(ramp, 1.02, 19.0), RATE, "mean")
    assert len(audio) == count_samples(1.02, RATE) == 16320
    assert audio[15999] > 0
    assert not audio[16000:].any()
    with pytest.raises(UtteranceError, match=r"ramp\.wav is truncated: 16000 of 16800 samples at 16000 Hz"):
        read_audio(utterance(ramp, 1.05, 19.0), RATE, "mean")


def test_fit():
    assert fit(np.ones(3), 2).tolist() == [1, 1]
    assert fit(np.ones(3), 5).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("suffix", ["flac", "wav", "ogg", "mp3"])
def test_truncated_file(tmp_path, suffix):
    path = write_audio(tmp_path / f"a.{suffix}", noise(RATE))
    assert len(read_audio(utterance(path, 1.0), RATE, "mean")) == RATE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reasons = "(is truncated|cannot be read|holds no samples)"
    with pytest.raises(UtteranceError, match=rf"line 3 of x\.jsonl: {path} {reasons}.*call-7") as error:
        read_audio(utterance(path, 1.0), RATE, "mean")
    assert error.value.reason == "bad_audio"


def test_flipped_byte_in_a_flac(tmp_path):
    path = write_audio(tmp_path / "a.flac", noise(RATE))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UtteranceError, match=f"{path} cannot be read .*call-7"):
        read_audio(utterance(path, 1.0), RATE, "mean")


def make_missing(path):
    pass


def make_dangling(path):
    os.symlink("nowhere.wav", path)


@pytest.mark.parametrize("make, reason", [
    (lambda path: path.write_bytes(b""), "it is empty"),
    (lambda path: path.write_text("not audio\n" * 50), "Format not recognised"),
    (lambda path: path.mkdir(), "it is a folder"),
    (make_dangling, "there is no such file"),
    (make_missing, "there is no such file"),
])
def test_what_is_no_audio_file(tmp_path, make, reason):
    path = tmp_path / "a.wav"
    make(path)
    with pytest.raises(UtteranceError, match=rf"line 3 of x\.jsonl: {path} cannot be read \(.*{reason}.*call-7") as error:
        read_audio(utterance(path, 1.0), RATE, "mean")
    assert "\n" not in str(error.value)


def test_file_without_samples(tmp_path):
    path = write_audio(tmp_path / "a.wav", noise(0))
    with pytest.raises(UtteranceError, match="holds no samples"):
        read_audio(utterance(path, 1.0), RATE, "mean")


@pytest.mark.parametrize("duration", [0.0, 0.0099])
def test_shorter_than_a_frame(ramp, duration):
    with pytest.raises(UtteranceError, match=f"audio of {duration} s is shorter than one frame"):
        read_audio(utterance(ramp, duration), RATE, "mean")
    assert len(read_audio(utterance(ramp, 0.01), RATE, "mean")) == 160


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_not_finite(tmp_path, value):
    audio = noise(RATE)
    audio[5000] = value
    path = write_audio(tmp_path / "a.wav", audio, subtype="FLOAT")
    with pytest.raises(UtteranceError, match=r"a\.wav has samples that are not finite"):
        read_audio(utterance(path, 1.0), RATE, "mean")


def test_silence_is_audio(tmp_path):
    path = write_audio(tmp_path / "a.wav", np.zeros((RATE, 2), np.float32))
    assert not read_audio(utterance(path, 1.0), RATE, "mean").any()


def test_channel_policies(tmp_path):
    audio = noise(RATE, channels=6)
    path = write_audio(tmp_path / "a.wav", audio, subtype="FLOAT")
    assert np.allclose(read_audio(utterance(path, 1.0), RATE, "mean"), audio.mean(1), atol=1e-7)
    assert np.array_equal(read_audio(utterance(path, 1.0), RATE, "first"), audio[:, 0])
    with pytest.raises(UtteranceError, match=r"audio has 6 channels and one is wanted; set data\.channels to mean or first"):
        read_audio(utterance(path, 1.0), RATE, "error")


def test_one_channel_passes_every_policy(ramp):
    for policy in ("mean", "first", "error"):
        assert len(read_audio(utterance(ramp, 0.1), RATE, policy)) == 1600


def test_silent_second_channel_halves_the_mean(tmp_path):
    audio = noise(RATE, channels=2)
    audio[:, 1] = 0
    path = write_audio(tmp_path / "a.wav", audio, subtype="FLOAT")
    assert np.allclose(read_audio(utterance(path, 1.0), RATE, "mean"), audio[:, 0] / 2, atol=1e-7)


def test_channels_that_cancel_are_noticed(tmp_path):
    audio = noise(RATE)
    path = write_audio(tmp_path / "a.wav", np.concatenate([audio, -audio], axis=1), subtype="FLOAT")
    with pytest.raises(UtteranceError, match=r"mean of the 2 channels cancels.*data\.channels to first"):
        read_audio(utterance(path, 1.0), RATE, "mean")
    assert np.array_equal(read_audio(utterance(path, 1.0), RATE, "first"), audio[:, 0])


def lhotse_utterance(folder: Path, path: Path, change=lambda cut: cut) -> Utterance:
    cut = change(Recording.from_file(path).to_cut())
    CutSet.from_cuts([cut]).to_file(folder / "cuts.jsonl.gz")
    return read_manifest(folder / "cuts.jsonl.gz", on_bad_text="skip")[0]


def test_lhotse_multichannel_cut_follows_the_policy(tmp_path):
    audio = noise(RATE, channels=2)
    found = lhotse_utterance(tmp_path, write_audio(tmp_path / "a.wav", audio, subtype="FLOAT"))
    assert np.allclose(read_audio(found, RATE, "mean"), audio.mean(1), atol=1e-7)
    with pytest.raises(UtteranceError, match="audio has 2 channels"):
        read_audio(found, RATE, "error")


def test_lhotse_cut_of_the_second_channel(tmp_path):
    audio = noise(RATE, channels=2)
    path = write_audio(tmp_path / "a.wav", audio, subtype="FLOAT")
    found = lhotse_utterance(tmp_path, path, lambda cut: cut.to_mono()[1])
    assert np.array_equal(read_audio(found, RATE, "error"), audio[:, 1])


def test_lhotse_cut_at_another_rate(tmp_path):
    path = write_audio(tmp_path / "a.wav", noise(44100), rate=44100)
    found = lhotse_utterance(tmp_path, path, lambda cut: cut.truncate(offset=0.25, duration=0.5))
    assert len(read_audio(found, RATE, "mean")) == RATE // 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a package that Lhotse tries
@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_lhotse_cut_of_a_truncated_file(tmp_path, suffix):
    path = write_audio(tmp_path / f"a.{suffix}", noise(RATE))
    found = lhotse_utterance(tmp_path, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UtteranceError, match=rf"{path} (is truncated|cannot be read)"):
        read_audio(found, RATE, "mean")


def test_whole_file(tmp_path, ramp):
    found = whole_file(ramp)
    assert (found.id, found.duration_sec, found.audio.offset_sec) == ("ramp", 20.0, 0.0)
    with pytest.raises(DataError, match=r"missing\.wav cannot be read as audio \(there is no such file\)"):
        whole_file(tmp_path / "missing.wav")
