"""Waveforms of utterances: the samples that the manifest declares, one channel, at the model's rate, or an error that names the file."""

import math
import os.path
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import resample_poly

from data.errors import DataError, UtteranceError
from data.manifest import Segment, Utterance
from model.lengths import HOP_SAMPLES

_ROUNDING_SEC = 0.025  # manifests round durations: what is missing within this is filled with zeros, more is a truncated file
_CANCELLED = 1e-4  # power of the mean over power of the channels below which they cancel each other

Fault = Callable[..., UtteranceError]  # of a message and, for whoever can follow it, what to set


def count_samples(duration_sec: float, sample_rate: int) -> int:
    """Samples of a duration: what planning counts on and what is read."""
    return round(duration_sec * sample_rate)


def read_audio(utterance: Utterance, sample_rate: int, channels: str) -> np.ndarray:
    """float32 [count_samples(duration, sample_rate)] of an utterance; raises UtteranceError with file and id for any fault."""

    def fault(message: str, remedy: str = "") -> UtteranceError:
        return utterance.fault("bad_audio", f"{message}; {remedy}" if remedy and not utterance.alone else message)

    samples = count_samples(utterance.duration_sec, sample_rate)
    if samples < HOP_SAMPLES:
        raise fault(f"audio of {utterance.duration_sec} s is shorter than one frame of 10 ms")
    read = _read_segment if isinstance(utterance.audio, Segment) else _read_cut
    audio, rate = read(utterance, fault)
    if not np.isfinite(audio).all():
        raise fault(f"{_name(utterance)} has samples that are not finite")
    return fit(resample(_one_channel(audio, channels, fault), rate, sample_rate), samples)


def whole_file(path: str | Path) -> Utterance:
    """A file from its first to its last sample as an utterance without text."""
    try:
        duration = soundfile.info(str(path)).duration
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{path} cannot be read as audio ({_reason(str(path), error)})") from error
    return Utterance(Path(path).stem, str(path), "", duration, Segment(str(path), 0.0, duration), alone=True)


def resample(audio: np.ndarray, rate: int, to_rate: int) -> np.ndarray:
    """Polyphase resampling of float32 [n] from one rate to another; ceil(n * to_rate / rate) samples."""
    if rate == to_rate:
        return audio
    divisor = math.gcd(rate, to_rate)
    return resample_poly(audio, to_rate // divisor, rate // divisor).astype(np.float32)


def fit(audio: np.ndarray, samples: int) -> np.ndarray:
    """The first `samples` samples, zeros where there are fewer."""
    return np.pad(audio[:samples], (0, max(0, samples - len(audio))))


def _read_segment(utterance: Utterance, fault: Fault) -> tuple[np.ndarray, int]:
    """float32 [samples, channels] and the file's rate."""
    segment = utterance.audio
    try:
        with soundfile.SoundFile(segment.path) as file:
            rate = file.samplerate
            start, wanted = count_samples(segment.offset_sec, rate), count_samples(segment.duration_sec, rate)
            if start >= file.frames:
                raise fault(f"offset {segment.offset_sec} s is beyond the end of {segment.path} ({file.frames / rate:.3f} s)"
                            if file.frames else f"{segment.path} holds no samples")
            file.seek(start)
            audio = file.read(wanted, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, RuntimeError) as error:
        raise fault(f"{segment.path} cannot be read ({_reason(segment.path, error)})") from error
    return _complete(audio, wanted, rate, utterance, fault), rate


def _read_cut(utterance: Utterance, fault: Fault) -> tuple[np.ndarray, int]:
    """float32 [samples, channels] and the rate of a Lhotse cut."""
    cut = utterance.audio
    try:
        audio = np.atleast_2d(cut.load_audio()).T
    except Exception as error:  # whatever Lhotse and its backends meet
        raise fault(f"{_name(utterance)} cannot be read ({_one_line(error)})") from error
    return _complete(audio, cut.num_samples, cut.sampling_rate, utterance, fault), cut.sampling_rate


def _complete(audio: np.ndarray, wanted: int, rate: int, utterance: Utterance, fault: Fault) -> np.ndarray:
    """Refuses audio that ends early; what rounding may have added to the declared duration is left to `fit`."""
    if len(audio) == 0:
        raise fault(f"{_name(utterance)} is empty")
    if len(audio) < wanted - _ROUNDING_SEC * rate:
        raise fault(f"{_name(utterance)} is truncated: {len(audio)} of {wanted} samples at {rate} Hz")
    return audio


def _one_channel(audio: np.ndarray, channels: str, fault: Fault) -> np.ndarray:
    """[n] of [n, channels] by the policy mean | first | error."""
    count = audio.shape[1]
    if count == 1 or channels == "first":
        return audio[:, 0]
    if channels == "error":
        raise fault(f"audio has {count} channels and one is wanted", "set data.channels to mean or first")
    mean = audio.mean(axis=1)
    if np.square(mean).mean() < _CANCELLED * np.square(audio).mean():
        raise fault(f"the mean of the {count} channels cancels to silence", "set data.channels to first")
    return mean


def _name(utterance: Utterance) -> str:
    """The file or files of an utterance."""
    if isinstance(utterance.audio, Segment):
        return utterance.audio.path
    tracks = getattr(utterance.audio, "tracks", None)
    cuts = [track.cut for track in tracks] if tracks else [utterance.audio]
    recordings = [cut.recording for cut in cuts if getattr(cut, "recording", None)]
    files = [source.source for recording in recordings for source in recording.sources if source.type == "file"]
    return ", ".join(files) or f"cut {utterance.audio.id}"


def _reason(path: str, error: Exception) -> str:
    if not os.path.exists(path):
        return "there is no such file"
    return "it is a folder" if os.path.isdir(path) else "it is empty" if os.path.getsize(path) == 0 else _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
