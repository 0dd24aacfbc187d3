import gzip
import json
from pathlib import Path

import pytest
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

from data.audio import read_audio
from data.errors import DataError, UtteranceError
from data.manifest import read_manifest, transcript
from tests.data.files import RATE, noise, write_audio, write_lines

GOOD = {"audio_filepath": "a.wav", "duration": 1.5, "text": "one"}


def utterances(path):
    manifest = read_manifest(path)
    return [manifest[index] for index in range(len(manifest))]


def test_nemo_line(tmp_path):
    more = {"offset": 2, "lang": "en", "speaker": "s1", "snr": 3.5}
    first, second = utterances(write_lines(tmp_path / "x.jsonl", [GOOD | more, GOOD | {"audio_filepath": "/b.wav"}]))
    assert first.audio.path == str(tmp_path / "a.wav")  # relative to the manifest
    assert (first.audio.offset_sec, first.audio.duration_sec, first.duration_sec) == (2.0, 1.5, 1.5)
    assert (first.id, first.text, first.lang, first.extra) == ("a", "one", "en", {"speaker": "s1", "snr": 3.5})
    assert second.audio.path == "/b.wav"
    assert (second.audio.offset_sec, second.lang, second.extra) == (0.0, None, {})


def test_line_numbers_count_blank_lines(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [GOOD, "", "   ", GOOD | {"text": ""}])
    assert len(read_manifest(path, on_bad_text="skip")) == 2
    with pytest.raises(DataError, match=f"line 4 of {path}: text is empty .*utterance a"):
        read_manifest(path)


@pytest.mark.parametrize("line, message", [
    ({"audio_filename": "a.wav", "duration": 1.0, "text": "x"}, r"no audio_filepath \(has: audio_filename, duration, text\)"),
    ({"audio_filepath": "a.wav", "text": "x"}, r"no duration \(has: audio_filepath, text\)"),
    ({"audio_filepath": "a.wav", "duration": 1.0, "txt": "x"}, r"no text \(has: audio_filepath, duration, txt\)"),
    ({}, r"no audio_filepath \(has: no key\)"),
    (GOOD | {"audio_filepath": None}, "audio_filepath is None"),
    (GOOD | {"audio_filepath": ["a.wav", "b.wav"]}, "audio_filepath is "),
    (GOOD | {"audio_filepath": ""}, "audio_filepath is ''"),
    (GOOD | {"duration": None}, "duration is None"),
    (GOOD | {"duration": "1.5"}, "duration is '1.5'"),
    (GOOD | {"duration": True}, "duration is True"),
    (GOOD | {"duration": -1.0}, "duration is -1.0"),
    (GOOD | {"duration": float("nan")}, "duration is nan"),
    (GOOD | {"duration": float("inf")}, "duration is inf"),
    (GOOD | {"offset": -0.1}, "offset is -0.1"),
    (GOOD | {"offset": "0"}, "offset is '0'"),
    ('{"audio_filepath": "a.wav", ', "is not JSON"),
    ("audio_filepath,duration,text", "is not JSON"),
    ('[{"audio_filepath": "a.wav"}]', "is list, not a JSON object"),
    ("3", "is int, not a JSON object"),
])
@pytest.mark.parametrize("on_bad_text", ["fail", "skip"])
def test_malformed_line_names_file_and_line(tmp_path, line, message, on_bad_text):
    path = write_lines(tmp_path / "x.jsonl", [GOOD, GOOD, line])
    with pytest.raises(DataError, match=f"line 3 of {path}.*{message}") as error:
        read_manifest(path, on_bad_text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "   ", None, float("nan"), 123, "\u200b", "a\ud800"])
def test_bad_text_is_found_at_the_start_or_left_to_the_policy(tmp_path, text):
    path = write_lines(tmp_path / "x.jsonl", [GOOD, GOOD | {"text": text, "id": "call-2"}])
    with pytest.raises(DataError, match=f"line 2 of {path}: text .*call-2.*; repair it, or .* data.on_bad_text=skip"):
        read_manifest(path)
    kept = read_manifest(path, on_bad_text="skip")
    with pytest.raises(UtteranceError, match=f"line 2 of {path}: text .*call-2") as error:
        transcript(kept[1])
    assert error.value.reason == "bad_text"


def test_repeated_ids_become_unique(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [GOOD, GOOD | {"audio_filepath": "b.wav"}, GOOD, GOOD | {"audio_filepath": "other/b.wav"},
                                              GOOD | {"audio_filepath": "c.wav"}])
    assert [utterance.id for utterance in utterances(path)] == ["a#1", "b#2", "a#3", "b#4", "c"]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_manifest(tmp_path, content):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.jsonl has no lines"):
        read_manifest(tmp_path / "x.jsonl")


def test_manifest_that_is_missing_or_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist; check the path"):
        read_manifest(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match=r"is a folder; name a file in it"):
        read_manifest(tmp_path)


def test_encodings(tmp_path):
    lines = (json.dumps(GOOD | {"text": "über"}, ensure_ascii=False) + "\r\n").encode()
    (tmp_path / "crlf.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    assert read_manifest(tmp_path / "crlf.jsonl")[0].text == "über"
    (tmp_path / "latin.jsonl").write_bytes(lines.decode().encode("latin-1"))
    with pytest.raises(DataError, match="line 1 .*is not JSON"):
        read_manifest(tmp_path / "latin.jsonl")


def test_truncated_gzip(tmp_path):
    packed = gzip.compress(b"\n".join([json.dumps(GOOD).encode()] * 100))
    (tmp_path / "x.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz cannot be read"):
        read_manifest(tmp_path / "x.jsonl.gz")


def lhotse_cut(folder: Path, name: str, **changes) -> MonoCut:
    recording = Recording.from_file(write_audio(folder / f"{name}.wav", noise(RATE)))
    word = SupervisionSegment(id=name, recording_id=name, start=0.1, duration=0.3, text=f"text of {name}", language="en")
    return MonoCut(**({"id": name, "start": 0.25, "duration": 0.5, "channel": 0, "recording": recording, "supervisions": [word]} | changes))


@pytest.mark.parametrize("name", ["cuts.jsonl.gz", "cuts.jsonl"])
def test_lhotse_cuts(tmp_path, name):
    cuts = [lhotse_cut(tmp_path, "a"), lhotse_cut(tmp_path, "b"), lhotse_cut(tmp_path, "a").append(lhotse_cut(tmp_path, "b"))]
    CutSet.from_cuts(cuts).to_file(tmp_path / name)
    found = utterances(tmp_path / name)
    assert [utterance.id for utterance in found[:2]] == ["a", "b"]
    assert [utterance.text for utterance in found] == ["text of a", "text of b", "text of a text of b"]
    assert [utterance.duration_sec for utterance in found] == [0.5, 0.5, 1.0]
    assert found[0].lang == "en"
    for utterance, cut in zip(found, cuts, strict=True):
        assert read_audio(utterance, RATE, "error").tolist() == cut.load_audio()[0].tolist()


def test_nemo_manifest_is_told_by_its_content_not_by_its_name(tmp_path):
    for name in ("x.jsonl", "x.json", "x.jsonl.gz", "x"):
        assert read_manifest(write_lines(tmp_path / name, [GOOD]))[0].id == "a"


def test_repeated_cut_ids_become_unique(tmp_path):
    path = write_lines(tmp_path / "cuts.jsonl", [lhotse_cut(tmp_path, "a").to_dict() for _ in range(3)])
    found = utterances(path)
    assert [utterance.id for utterance in found] == ["a#1", "a#2", "a#3"]
    assert len(read_audio(found[1], RATE, "error")) == RATE // 2


@pytest.mark.parametrize("drop, message", [
    ("duration", "line 1 .*is not a Lhotse cut"),
    ("type", "line 1 .*is not a Lhotse cut"),
    ("recording", "line 1 .*cut a has no recording"),
])
def test_malformed_cut(tmp_path, drop, message):
    entry = lhotse_cut(tmp_path, "a").to_dict()
    del entry[drop]
    with pytest.raises(DataError, match=message):
        read_manifest(write_lines(tmp_path / "cuts.jsonl", [entry]))


@pytest.mark.parametrize("supervisions", [[], [SupervisionSegment("s", "a", 0, 0.1, text=None)]])
def test_cut_without_text(tmp_path, supervisions):
    path = write_lines(tmp_path / "cuts.jsonl", [lhotse_cut(tmp_path, "a", supervisions=supervisions).to_dict()])
    with pytest.raises(DataError, match="line 1 .*text is None, not a string .*utterance a"):
        read_manifest(path)
