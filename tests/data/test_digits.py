import collections
import itertools
import json
import zlib

import numpy as np
import pytest
import soundfile

from data import digits
from data.errors import DataError
from model.lengths import encoder_frames


def test_embedded_speech_is_complete():
    """Every line of the manifest has its file, of the declared length, and every file has a line; all of it within 6.5 MB."""
    entries = [json.loads(line) for line in (digits.SPEECH / "manifest.jsonl").read_text().splitlines()]
    files = [f"audio/{path.name}" for path in (digits.SPEECH / "audio").iterdir()]
    assert sorted(entry["audio_filepath"] for entry in entries) == sorted(files)
    for entry in entries:
        info = soundfile.info(digits.SPEECH / entry["audio_filepath"])
        assert (info.samplerate, info.channels) == (digits.SAMPLE_RATE, 1)
        assert abs(info.frames - entry["duration"] * digits.SAMPLE_RATE) <= 2
        assert entry["lang"] == "en"
    assert sum(path.stat().st_size for path in digits.SPEECH.rglob("*") if path.is_file()) <= 6.5e6
    assert "CC BY-SA 3.0" in (digits.SPEECH / "README.md").read_text()
    assert "Allison Smith" in (digits.SPEECH / "LICENSE").read_text()


def test_a_string_is_a_function_of_seed_and_index():
    first = [digits.train_string(3, index, 3, 7, 3) for index in range(50)]
    assert [digits.train_string(3, index, 3, 7, 3) for index in reversed(range(50))] == first[::-1]
    assert len({string.text for string in first}) == 50
    other = [digits.train_string(4, index, 3, 7, 3) for index in range(50)]
    assert not {string.text for string in first} & {string.text for string in other}


def test_train_and_held_out_strings_never_meet():
    """20,000 strings of the curriculum and of the whole range; the rule itself is spelt out here."""
    train = {digits.train_string(0, index, *digits.curriculum(index, 10_000, 3, 7), 3).text for index in range(20_000)}
    held_out = {string.text for string in digits.held_out_strings(300, 3, 7)}
    assert len(held_out) == 300
    assert not train & held_out
    assert all(zlib.crc32(text.encode()) % 10 == 0 and 3 <= len(text.split()) <= 7 for text in held_out)
    assert all(zlib.crc32(text.encode()) % 10 or len(text.split()) < 3 for text in train)
    assert {len(text.split()) for text in train} == {1, 2, 3, 4, 5, 6, 7}
    assert {text for text in train if " " not in text} == set(digits.WORDS)  # no word is only ever heard among others


def test_lengths_and_words_are_drawn_evenly():
    strings = [digits.train_string(0, index, 3, 7, 3) for index in range(5000)]
    lengths = collections.Counter(len(string.words) for string in strings)
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert min(lengths.values()) > 850
    words = collections.Counter(word for string in strings for word in string.words)
    assert set(words) == set(digits.WORDS)
    assert max(words.values()) < 1.3 * min(words.values())
    assert {speed for string in strings[:50] for speed in string.speeds} == {0, 1, 2}
    pauses = [pause for string in strings for pause in string.pauses]
    assert min(pauses) < 20
    assert 3980 < max(pauses) <= 4000
    gains = [20 * np.log10(string.gain) for string in strings]
    assert -6 <= min(gains) < -5.9
    assert 2.9 < max(gains) <= 3


def test_curriculum_grows_from_one_word_to_all():
    lengths = [digits.curriculum(step, 70, 3, 7) for step in range(100)]
    assert lengths[0] == (1, 1)
    assert lengths[69][1] == 6
    assert set(lengths[70:]) == {(3, 7)}
    assert [most for _, most in lengths] == sorted(most for _, most in lengths)
    assert {most for _, most in lengths} == {1, 2, 3, 4, 5, 6, 7}
    assert all(fewest == min(3, most) for fewest, most in lengths)
    assert digits.curriculum(0, 0, 3, 7) == (3, 7)


def test_held_out_strings_do_not_depend_on_how_many_are_asked_for():
    assert digits.held_out_strings(5, 3, 7) == digits.held_out_strings(20, 3, 7)[:5]


def test_too_few_held_out_strings_are_an_error():
    with pytest.raises(DataError, match=r"data\.validation_utterances is 100, but only \d+ held-out strings of 1 to 1 words"):
        digits.held_out_strings(100, 1, 1)


@pytest.mark.parametrize("index", range(6))
def test_waveform_is_what_lhotse_mixes(index):
    string = digits.train_string(0, index, 1, 7, 3)
    cut = digits.string_cut(string)
    audio = digits.render(string)
    assert audio.dtype == np.float32
    assert len(audio) == digits.count_samples(string) == cut.num_samples
    assert np.array_equal(audio, cut.load_audio()[0] * np.float32(string.gain))
    assert [word.text for word in sorted(cut.supervisions, key=lambda word: word.start)] == list(string.words)
    assert np.array_equal(audio, digits.render(string))


def test_waveform_is_the_recordings_with_pauses_and_gain():
    string = digits.DigitString(("seven", "zero"), (1, 1), (800,), 0.5)
    seven, zero = (soundfile.read(digits.SPEECH / f"audio/digits_{n}.flac", dtype="float32")[0] for n in (7, 0))
    assert np.array_equal(digits.render(string), np.concatenate([seven, np.zeros(800, np.float32), zero]) / 2)


def test_speed_changes_length_and_pitch():
    original, slow, fast = (digits.waveforms()[f"seven-{speed}"] for speed in (1, 0, 2))
    assert len(slow) == -(-len(original) * 10 // 9)
    assert len(fast) == -(-len(original) * 10 // 11)
    times = np.linspace(0.2, 0.8, 2000)
    for other in (slow, fast):  # the same shape on a stretched time axis
        stretched = np.interp(times * len(other), np.arange(len(other)), other)
        assert np.corrcoef(np.interp(times * len(original), np.arange(len(original)), original), stretched)[0, 1] > 0.9


def test_every_word_has_the_frames_that_ctc_needs():
    """One a character and one between two equal characters: otherwise its loss is infinite."""
    for key, audio in digits.waveforms().items():
        word = key.rsplit("-", 1)[0]
        repeats = sum(a == b for a, b in itertools.pairwise(word))
        assert encoder_frames(len(audio)) > len(word) + repeats + 1  # and a space


def test_longest_string_bounds_all():
    bound = digits.longest_samples(7)
    assert max(digits.count_samples(digits.train_string(0, index, 7, 7, 3)) for index in range(300)) < bound
    longest = max(digits.waveforms(), key=lambda key: len(digits.waveforms()[key]))
    word, speed = longest.rsplit("-", 1)
    assert digits.count_samples(digits.DigitString((word,) * 7, (int(speed),) * 7, (4000,) * 6, 1.0)) == bound
