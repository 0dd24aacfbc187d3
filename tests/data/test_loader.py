import itertools
import json
import re
from collections import Counter
from typing import Any

import pytest
import torch

from configs.schema import RowSize
from data.errors import DataError
from data.loader import decoding_batches, empty_batch, file_batches, make_loader, validation_batches
from data.packing import IGNORE, Load
from data.plan import resumed, take
from data.tokenizer import load_tokenizer
from data.workers import Made
from tests.data.files import RATE, config, digit_config, epochs, ids, noise, speech_manifest, write_audio, write_lines


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return speech_manifest(tmp_path_factory.mktemp("speech"), 40)


def same(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]) if torch.is_tensor(value) else value == second[key], key


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_utterance_once_an_epoch_over_all_ranks(manifest, world):
    ranks = [epochs(make_loader(config(manifest), 5, rank, world), 3) for rank in range(world)]
    for epoch in range(3):
        delivered = [name for batches in ranks for batch in batches if batch["state"]["epoch"] == epoch for name in batch["ids"]]
        assert sorted(delivered) == sorted(f"utt-{i}" for i in range(40))


def test_order_differs_by_epoch_and_seed_and_not_by_chance(manifest):
    first = epochs(make_loader(config(manifest), 5, 0, 1), 2)
    halves = [[name for batch in first if batch["state"]["epoch"] == epoch for name in batch["ids"]] for epoch in (0, 1)]
    assert halves[0] != halves[1]
    assert halves[0] != sorted(halves[0], key=lambda name: int(name[4:]))
    assert ids(epochs(make_loader(config(manifest), 5, 0, 1), 2)) == ids(first)
    assert ids(epochs(make_loader(config(manifest), 6, 0, 1), 2)) != ids(first)


def test_without_shuffling_the_order_is_the_manifest_s(manifest):
    batches = epochs(make_loader(config(manifest, shuffle=False), 5, 0, 1), 1)
    assert batches[0]["ids"][0] == "utt-0"
    seen = ids(batches)
    assert max(abs(int(name[4:]) - place) for place, name in enumerate(seen)) <= 10  # the look-ahead window alone moves them


def test_batch_contents(manifest):
    cfg = config(manifest, prompt="say <|audio|>!")
    tokenizer = load_tokenizer(cfg)
    for batch in epochs(make_loader(cfg, 0, 0, 1), 1):
        bounds, starts = batch["cu_seqlens_U1"].tolist(), batch["audio_starts_U"].tolist()
        assert len(batch["ids"]) == len(batch["texts"])
        for u, text in enumerate(batch["texts"]):
            slots = slice(bounds[u], bounds[u + 1])
            labels, tokens, frames = (batch[name][slots] for name in ("labels_T", "tokens_T", "frames_T"))
            assert tokenizer.decode(tokens[frames < 0].tolist()) == "say !" + text
            assert labels[labels != IGNORE].tolist() == [*tokenizer.encode(text), tokenizer.eos_id]
            assert frames[frames >= 0].tolist() == list(range(starts[u], starts[u] + batch["audio_lengths_U"][u]))
        assert batch["fill"] == bounds[-1] / len(batch["tokens_T"])
        assert batch["audio_sec"] == batch["audio_samples_U"].sum().item() / RATE


def test_labels_decode_to_the_transcripts_and_the_end():
    cfg = digit_config(curriculum_steps=60)
    tokenizer = load_tokenizer(cfg)
    for batch in itertools.islice(make_loader(cfg, 0, 0, 1), 100):
        labels = batch["labels_T"]
        segments = batch["segments_T"]
        found = [labels[(segments == u) & (labels != IGNORE)].tolist() for u in range(len(batch["ids"]))]
        assert [tokenizer.decode(answer[:-1]) for answer in found] == batch["texts"]
        assert {answer[-1] for answer in found} == {tokenizer.eos_id}
        assert (labels[segments == 5] == IGNORE).all()


def test_end_is_supervised_even_where_it_is_the_padding(manifest):
    cfg = config(manifest)
    batch = next(make_loader(cfg, 0, 0, 1))
    assert (batch["labels_T"] == load_tokenizer(cfg).eos_id).sum() == len(batch["ids"])


@pytest.mark.parametrize("kind", ["manifest", "digits"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_continues_exactly(manifest, kind, workers):
    """From every batch of an uninterrupted run of 3 epochs, through JSON, with the same or another number of workers."""
    cfg = config(manifest) if kind == "manifest" else digit_config(curriculum_steps=6)
    loader = make_loader(cfg, 3, 1, 2, batches_per_step=2)
    whole = epochs(loader, 3) if kind == "manifest" else list(itertools.islice(loader, 20))
    stops = range(len(whole) - 1) if workers == 0 else [len(whole) // 2]
    for stop in stops:
        state = json.loads(json.dumps(whole[stop]["state"]))
        resumed = make_loader(type(cfg)(**(vars(cfg) | {"workers": workers})), 3, 1, 2, state=state, batches_per_step=2)
        rest = list(itertools.islice(resumed, len(whole) - stop - 1))
        assert ids(rest) == ids(whole[stop + 1 :])
        for one, two in zip(rest, whole[stop + 1 :], strict=True):
            same(one, two)


@pytest.mark.parametrize("worlds", [(2, 3, 1), (3, 3, 2), (1, 4, 4)], ids=str)
def test_another_number_of_processes_shares_what_is_left(manifest, worlds):
    """Each utterance once in each of the epochs, though the ranks change twice within them, and at different points."""
    cfg, seen = config(manifest, workers=0), Counter[str]()
    states: list[dict[str, Any]] = []
    for generation, world in enumerate(worlds):
        own = [json.loads(json.dumps(resumed(states, rank, world))) if generation else None for rank in range(world)]
        loaders = [make_loader(cfg, 3, rank, world, state) for rank, state in enumerate(own)]
        last = generation == len(worlds) - 1
        read = [list(itertools.takewhile(lambda batch: batch["state"]["epoch"] < 2, loader)) if last
                else list(itertools.islice(loader, 1 + rank)) for rank, loader in enumerate(loaders)]
        seen.update(f"{batch['state']['epoch']} {name}" for batches in read for batch in batches for name in batch["ids"])
        states = [batches[-1]["state"] for batches in read if batches]
    assert len(seen) == 2 * 40
    assert set(seen.values()) == {1}


def test_counts_of_what_was_skipped_outlive_another_number_of_processes():
    ledgers = [{"epoch": 1, "delivered": 5, "skipped": 1, "counters": {"audio": 2, "text": r}} for r in (1, 4)]
    states = [{"kind": "manifest", "seed": 0, "utterances": 9, "world": 2, "rank": rank, "epoch": 1, "position": 3, "pending": [],
               "ledger": ledger} for rank, ledger in enumerate(ledgers)]
    assert [resumed(states, rank, 3)["ledger"]["counters"] for rank in range(3)] == [
        {"audio": 4, "text": 5}, {"audio": 0, "text": 0}, {"audio": 0, "text": 0}]


def test_digit_strings_go_on_behind_the_last_one_used():
    cfg = digit_config()
    states = [list(itertools.islice(make_loader(cfg, 0, rank, 2), 2 + rank))[-1]["state"] for rank in range(2)]
    used = max(state["index"] for state in states) * 2
    first = [resumed(states, rank, 3)["index"] * 3 + rank for rank in range(3)]
    assert min(first) >= used
    assert max(first) < used + 6


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(manifest, workers):
    alone, helped = (epochs(make_loader(config(manifest, workers=count), 3, 0, 1), 2) for count in (0, workers))
    for one, two in zip(alone, helped, strict=True):
        same(one, two)


@pytest.mark.parametrize("change", [{"world": 4}, {"world": 1}, {"rank": 0}, {"seed": 9}])
def test_a_position_of_another_run_is_refused_with_both_values(manifest, change):
    state = next(make_loader(config(manifest), 3, 1, 2))["state"]
    call = {"seed": 3, "rank": 1, "world": 2} | change
    call["rank"] = min(call["rank"], call["world"] - 1)
    key, value = next(iter(change.items()))
    saved = {"world": 2, "rank": 1, "seed": 3}[key]
    with pytest.raises(DataError, match=f"for {key}={saved} and this run has {key}={value}"):
        make_loader(config(manifest), state=state, **call)


def test_a_position_in_another_manifest_is_refused(manifest, tmp_path):
    state = next(make_loader(config(manifest), 3, 0, 1))["state"]
    with pytest.raises(DataError, match="for utterances=40 and this run has utterances=39"):
        make_loader(config(speech_manifest(tmp_path, 39)), 3, 0, 1, state=state)


def test_rows_are_filled_and_the_smallest_that_holds_them_is_taken():
    rows = [RowSize(10, 10, 2, 10, 10), RowSize(20, 20, 3, 10, 10)]
    loads = [Load(tokens, 1, 1, 1, 1) for tokens in (8, 13, 5, 4, 1)]
    assert take(loads, rows) == ([0, 2, 3], rows[1])  # the second does not fit beside the first; three are the most
    assert take(loads, rows, in_order=True) == ([0], rows[0])
    assert take(loads[2:4], rows) == ([0, 1], rows[0])
    assert take([], rows) == ([], rows[0])


def test_no_row_is_over_its_size_and_all_but_the_last_of_an_epoch_are_full(tmp_path):
    batches = epochs(make_loader(config(speech_manifest(tmp_path, 41)), 0, 0, 1), 4)
    assert {len(batch["tokens_T"]) for batch in batches} == {40, 100}
    for batch, following in itertools.pairwise(batches):
        assert batch["fill"] <= 1
        if following["state"]["epoch"] == batch["state"]["epoch"]:
            frames = int((batch["audio_segments_A"] < len(batch["audio_starts_U"])).sum())
            assert batch["fill"] > 0.75 or len(batch["ids"]) == 5 or frames > 60 - 12


def test_several_processes_use_one_size(tmp_path):
    cfg = config(speech_manifest(tmp_path, 2))
    for world, size in (1, 40), (2, 100):  # the small row would do for both
        assert {len(batch["tokens_T"]) for batch in epochs(make_loader(cfg, 0, 0, world), 3)} == {size}


@pytest.mark.parametrize("kind", ["manifest", "digits"])
@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_validation_sees_each_utterance_once(manifest, kind, world):
    cfg = config(manifest, validation={"dev": str(manifest)}) if kind == "manifest" else digit_config()
    name = "dev" if kind == "manifest" else "held_out"
    ranks = [list(validation_batches(cfg, name, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [name for batches in ranks for name in ids(batches)]
    assert len(seen) == len(set(seen)) == (40 if kind == "manifest" else 20)
    assert len({len(batch["tokens_T"]) for batches in ranks for batch in batches}) == 1
    for batch in itertools.chain(*ranks):
        assert (batch["labels_T"] != IGNORE).any() == bool(batch["ids"])


@pytest.mark.parametrize("seed", [0, 1])
def test_no_validation_string_is_trained_on(seed):
    cfg = digit_config(validation_utterances=100)
    held_out = {text for batch in validation_batches(cfg, "held_out", 0, 1) for text in batch["texts"]}
    assert len(held_out) == 100
    trained = {text for batch in itertools.islice(make_loader(cfg, seed, 0, 1), 60) for text in batch["texts"]}
    assert not held_out & trained


def test_rows_for_decoding_hold_prompts_alone():
    cfg = digit_config(prompt="say <|audio|>")
    full = list(validation_batches(cfg, "held_out", 0, 1))
    bare = list(decoding_batches(cfg, "held_out", 0, 1))
    references = [dict(zip(ids(batches), [text for batch in batches for text in batch["texts"]], strict=True)) for batches in (full, bare)]
    assert references[0] == references[1]
    assert len(references[0]) == len(ids(bare)) == 20
    before = len(load_tokenizer(cfg).encode("say "))
    for batch in bare:
        count = len(batch["ids"])
        assert torch.equal(batch["cu_seqlens_U1"].diff()[:count], batch["audio_lengths_U"][:count] + before)
        assert (batch["labels_T"] == -100).all()
        assert batch["pieces"] == [0] * count
        assert (batch["frames_T"][batch["cu_seqlens_U1"][1 : count + 1] - 1] >= 0).all()


def test_unknown_validation_set(manifest):
    with pytest.raises(DataError, match=r"data\.validation has no set 'test' \(has: dev\)"):
        next(validation_batches(config(manifest, validation={"dev": str(manifest)}), "test", 0, 1))


def test_one_file(tmp_path):
    path = write_audio(tmp_path / "x.wav", noise(8820), rate=44100)
    (batch,) = file_batches(config(), path, 0, 1)
    assert (batch["ids"], batch["texts"], batch["pieces"]) == (["x"], [""], [0])
    assert batch["audio_sec"] == 0.2
    assert batch["audio_lengths_U"].tolist() == [3, 0, 0, 0, 0]
    assert batch["cu_seqlens_U1"].tolist() == [0, 3, 3, 3, 3, 3]
    assert (batch["audio_S"] != 0).sum() > 3100


def test_one_file_that_is_no_audio(tmp_path):
    (tmp_path / "y.wav").write_text("no audio")
    with pytest.raises(DataError, match=r"y\.wav cannot be read as audio"):
        file_batches(config(), tmp_path / "y.wav", 0, 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("damage", "settings", "words"), [
    ("half", {}, "{path} cannot be read"), ("half", {"on_bad_audio": "skip", "max_skipped": 1.0}, "{path} cannot be read"),
    ("stereo", {"channels": "error"}, "{path}: audio has 2 channels and one is wanted$")])
def test_a_fault_of_one_file_is_about_the_file_alone(tmp_path, damage, settings, words, workers):
    """Nothing is left that could be transcribed without it, and nobody who names a file has set how to read a manifest."""
    path = write_audio(tmp_path / "x.flac", noise(RATE))
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        write_audio(path, noise(RATE, channels=2))
    with pytest.raises(DataError, match="^" + words.format(path=re.escape(str(path)))) as error:
        list(file_batches(config(workers=workers, **settings), path, 0, 1))
    assert not re.search(r"data\.|utterance", str(error.value))


def test_long_audio_is_cut_at_quiet_moments_and_nothing_is_lost(tmp_path):
    """5 s of noise for rows of at most 12 frames (0.97 s) an utterance: 7 pieces; 40 ms of silence near each even cut."""
    audio, quiet_sec = noise(5 * RATE), [0.76, 1.39, 2.18, 2.82, 3.60, 4.25]
    for moment in quiet_sec:
        audio[int((moment - 0.02) * RATE) : int((moment + 0.02) * RATE)] = 0
    write_audio(tmp_path / "x.wav", audio, subtype="FLOAT")
    manifest = write_lines(tmp_path / "m.jsonl", [
        {"audio_filepath": "x.wav", "duration": 5.0, "text": "all", "id": "long"},
        {"audio_filepath": "x.wav", "offset": 1.0, "duration": 0.5, "text": "part", "id": "short"}])
    found = {}
    for rank in range(2):
        for batch in decoding_batches(config(manifest, validation={"dev": str(manifest)}), "dev", rank, 2):
            for u, (name, piece) in enumerate(zip(batch["ids"], batch["pieces"], strict=True)):
                assert (name, piece) not in found
                start = int(batch["audio_starts_U"][u]) * 1280
                found[name, piece] = batch["audio_S"][start : start + int(batch["audio_samples_U"][u])]
                assert batch["texts"][u] == {"long": "all", "short": "part"}[name]
    pieces = [found["long", piece] for piece in range(7)]
    assert len(found) == 8
    assert torch.equal(torch.cat(pieces), torch.from_numpy(audio[:, 0]))
    cuts = torch.cumsum(torch.tensor([len(piece) for piece in pieces]), 0)[:-1] / RATE
    assert (cuts - torch.tensor(quiet_sec)).abs().max() <= 0.01 + 1 / RATE  # the middle of 20 ms, all of them silent
    assert len(found["short", 0]) == RATE // 2


def test_curriculum_counts_optimizer_steps():
    cfg = digit_config(curriculum_steps=4)
    longest = [max(len(text.split()) for text in batch["texts"])
               for batch in itertools.islice(make_loader(cfg, 0, 0, 1, batches_per_step=3), 12)]
    assert longest[:3] == [1, 1, 1]
    assert max(longest[3:6]) == 2
    assert max(longest[6:9]) == 4
    assert max(longest[9:]) == 5


def test_digit_strings_go_on_over_ranks_without_repetition():
    seen = [name for rank in (0, 1, 2) for batch in itertools.islice(make_loader(digit_config(), 0, rank, 3), 5) for name in batch["ids"]]
    assert len(seen) == len(set(seen))
    assert {f"string-{i}" for i in range(30)} <= set(seen)


def test_tensors_are_pinned_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    made = Made({"tokens_T": torch.zeros(2), "ids": ["a"], "fill": 0.5}, (), {})
    assert made.pin_memory() is made
    same(made.batch, {"tokens_T": torch.ones(2), "ids": ["a"], "fill": 0.5})


def test_empty_batch_has_the_shapes_of_a_full_one():
    cfg = digit_config()
    full, empty = next(make_loader(cfg, 0, 0, 1)), empty_batch(cfg.rows[0])
    assert {name: (value.shape, value.dtype) for name, value in full.items() if torch.is_tensor(value)} == \
        {name: (value.shape, value.dtype) for name, value in empty.items()}
    assert (empty["labels_T"] == IGNORE).all()
