import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import data.workers
from data.errors import DataError
from data.loader import make_loader
from data.sources import example as read_example
from data.workers import seed_worker
from tests.data.files import RATE, config, epochs, ids, noise, speech_manifest, write_audio, write_lines

SKIP = {"on_bad_audio": "skip", "on_bad_text": "skip", "max_skipped": 0.2}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return speech_manifest(tmp_path_factory.mktemp("speech"), 40)


def long_manifest(folder):
    """200 cuts of 0.2 s and one of half an hour, which exists on paper only."""
    write_audio(folder / "a.wav", noise(RATE))
    lines = [{"audio_filepath": "a.wav", "duration": 0.2, "text": "one", "id": f"utt-{i}"} for i in range(200)]
    lines.insert(100, {"audio_filepath": "a.wav", "duration": 1800.0, "text": "two", "id": "lecture"})
    return write_lines(folder / "x.jsonl", lines)


def test_too_long_ends_the_run_by_name(tmp_path):
    with pytest.raises(DataError, match=r"line 101 of .*: 1800\.0 s .*tokens 22504 > 100.*utterance lecture.*data\.on_too_long=skip"):
        epochs(make_loader(config(long_manifest(tmp_path)), 0, 0, 1), 1)


def test_too_long_is_skipped_and_counted_each_epoch(tmp_path, caplog):
    batches = epochs(make_loader(config(long_manifest(tmp_path), on_too_long="skip", max_skipped=0.01), 0, 0, 1), 2)
    assert collections.Counter(ids(batches)) == {f"utt-{i}": 2 for i in range(200)}
    counts = [batch["counters"]["too_long"] for batch in batches]
    assert counts == sorted(counts)
    assert max(counts) == 2
    assert all(batch["fill"] <= 1 for batch in batches)
    assert "1800.0 s of audio" in caplog.text
    assert "lecture" in caplog.text


def test_too_many_skips_end_the_run(tmp_path):
    with pytest.raises(DataError, match=r"1 of 201 utterances of epoch 0 were skipped, more than data\.max_skipped=0\.001.*lecture"):
        epochs(make_loader(config(long_manifest(tmp_path), on_too_long="skip"), 0, 0, 1), 1)


def damaged_manifest(folder):
    """40 utterances, 4 of them damaged: a truncated file, a missing one, no text, a character that the tokenizer lacks."""
    lines = [json.loads(line) for line in speech_manifest(folder, 40).read_text().splitlines()]
    half = write_audio(folder / "half.wav", noise(RATE)).read_bytes()[:RATE]
    (folder / "half.wav").write_bytes(half)
    lines[3] |= {"audio_filepath": "half.wav", "offset": 0.0, "duration": 0.9}
    lines[7] |= {"audio_filepath": "gone.wav"}
    lines[11] |= {"text": None}
    lines[13] |= {"text": "naïve"}
    return write_lines(folder / "damaged.jsonl", lines)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_utterances_are_skipped_and_counted_and_nothing_else_is_lost(tmp_path, workers, caplog):
    cfg = config(damaged_manifest(tmp_path), workers=workers, **SKIP)
    delivered: list[str] = []
    skipped = 0
    for rank in (0, 1):
        loader = make_loader(cfg, 0, rank, 2)
        for batch in loader:
            if batch["state"]["epoch"] == 2:  # knows of all that the first two epochs dropped, and of what this batch itself did
                skipped += sum(batch["counters"].values()) - batch["state"]["ledger"]["skipped"]
                break
            delivered += batch["ids"]
    assert collections.Counter(delivered) == {f"utt-{i}": 2 for i in range(40) if i not in (3, 7, 11, 13)}
    assert skipped == 8
    for reason, name in [("bad_audio", "utt-3"), ("bad_audio", "utt-7"), ("bad_text", "utt-11"), ("bad_text", "utt-13")]:
        lines = [message for message in caplog.messages if f"(utterance {name})" in message]
        assert len(lines) >= 2
        assert all(f"skipped ({reason}): line {int(name[4:]) + 1} of {cfg.manifest}" in line for line in lines)


def test_counters_survive_resuming(tmp_path):
    cfg = config(damaged_manifest(tmp_path), **SKIP)
    whole = epochs(make_loader(cfg, 0, 0, 1), 3)
    assert min(whole[-1]["counters"][reason] for reason in ("bad_audio", "bad_text")) > 3
    state = whole[len(whole) // 2]["state"]
    rest = list(itertools.islice(make_loader(cfg, 0, 0, 1, state=state), len(whole) - len(whole) // 2 - 1))
    assert [batch["counters"] for batch in rest] == [batch["counters"] for batch in whole[len(whole) // 2 + 1 :]]


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_audio_ends_the_run_by_name(tmp_path, workers):
    cfg = config(damaged_manifest(tmp_path), workers=workers, on_bad_text="skip", max_skipped=0.2)
    with pytest.raises(DataError, match=r"(half|gone)\.wav .*data\.on_bad_audio=skip") as error:
        epochs(make_loader(cfg, 0, 0, 1), 1)
    name = {"half": "utt-3", "gone": "utt-7"}["half" if "half.wav" in str(error.value) else "gone"]
    assert f"line {int(name[4:]) + 1} of {cfg.manifest}: " in str(error.value)
    assert f"(utterance {name})" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_character_ends_the_run_by_name(tmp_path):
    path = speech_manifest(tmp_path, 5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["text"] = "naïve"
    with pytest.raises(DataError, match=r"line 3 of .*: text has 'ï', .*utterance utt-2.*data\.on_bad_text=skip"):
        epochs(make_loader(config(write_lines(path, lines)), 0, 0, 1), 1)


def test_a_manifest_of_which_nothing_is_left_ends_the_run(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"audio_filepath": "gone.wav", "duration": 0.5, "text": "one"}] * 3)
    with pytest.raises(DataError, match="none of the 3 utterances of this process could be used in epoch 0"):
        next(make_loader(config(path, on_bad_audio="skip", max_skipped=1.0), 0, 0, 1))


def test_fewer_utterances_than_processes(tmp_path):
    with pytest.raises(DataError, match="has 3 utterances for 4 data-parallel processes"):
        make_loader(config(speech_manifest(tmp_path, 3)), 0, 0, 4)


def fail_on(monkeypatch, name, action):
    def example(item, cfg):
        if item.id == name:
            action()
        return read_example(item, cfg)

    monkeypatch.setattr(data.workers, "example", example)


def crash():
    raise AttributeError("'NoneType' object has no attribute 'shape'")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_worker_s_exception_ends_the_run_with_its_own_message(manifest, monkeypatch, workers):
    fail_on(monkeypatch, "utt-17", crash)
    with pytest.raises(RuntimeError, match="(?s)utterance utt-17: AttributeError: 'NoneType' object has no attribute 'shape'"):
        epochs(make_loader(config(manifest, workers=workers), 0, 0, 1), 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the same error again while the loader is cleaned up
@pytest.mark.parametrize("action", [lambda: os._exit(9), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_dead_worker_ends_the_run_within_seconds(manifest, monkeypatch, action):
    fail_on(monkeypatch, "utt-17", action)
    started = time.monotonic()
    # The signal of a child's death raises torch's own error if it comes while nothing is awaited.
    message = "(a data worker hangs or was killed while the batch of .*utt-)|(DataLoader worker)"
    with pytest.raises((DataError, RuntimeError), match=message):
        epochs(make_loader(config(manifest, workers=1), 0, 0, 1), 1)
    assert time.monotonic() - started < 30  # far below the time-out


def worker_draws(cfg, seed, rank, monkeypatch):
    """The first random numbers of each worker."""

    def example(item, cfg):
        made = read_example(item, cfg)
        draws = (random.random(), float(np.random.random()), float(torch.rand(())))
        return type(made)(json.dumps(draws), made.prompt, made.answer, made.end, made.samples)

    monkeypatch.setattr(data.workers, "example", example)
    return [tuple(json.loads(name)) for name in ids(epochs(make_loader(cfg, seed, rank, 2), 1))]


def test_no_two_workers_draw_the_same_random_numbers(manifest, monkeypatch):
    draws = [draw for rank in (0, 1) for draw in worker_draws(config(manifest, workers=2), 0, rank, monkeypatch)]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == len(draws) == 40


@pytest.mark.parametrize("place", range(4))
def test_seed_epoch_rank_and_worker_all_enter(place):
    def draws(*key):
        seed_worker(*key)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        key = [1, 2, 3, 4]
        first = draws(*key)
        assert draws(*key) == first
        key[place] += 1
        assert not set(draws(*key)) & set(first)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def test_loading_leaves_the_random_state_alone(manifest):
    before = random.getstate(), torch.get_rng_state()
    epochs(make_loader(config(manifest, workers=1), 0, 0, 1), 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


PROGRAM = """
import os, signal, sys, time
from data import workers
from data.loader import make_loader
from tests.data.files import config
read = workers.example
def example(item, cfg):
    if item.id == "utt-17" and sys.argv[2] == "hang":
        time.sleep(3600)
    return read(item, cfg)
workers.example = example
signal.signal(signal.SIGTERM, lambda *_: None)  # a training loop that saves first
rows = make_loader(config(sys.argv[1], workers=1, timeout_sec=2), 0, 0, 1)
for number, batch in enumerate(rows):
    if sys.argv[2] == "left":
        break
    if sys.argv[2] == "signal" and number == 3:
        os.killpg(0, signal.SIGTERM)
    if batch["state"]["epoch"] == 3:
        break
print("done")
"""


@pytest.mark.parametrize("case, code, output", [("hang", 1, ""), ("signal", 0, "done\n"), ("left", 0, "done\n")])
def test_a_process_group_ends_with_its_main_process(manifest, case, code, output):
    """A hanging worker does not outlive the run; workers go on after a SIGTERM to all, until the main process has ended; a program that
    still holds its rows ends too."""
    command = [sys.executable, "-c", PROGRAM, str(manifest), case]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, output), err
    assert ("a data worker hangs" in err) == (case == "hang")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
