import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RowSize
from data.packing import AUDIO, IGNORE, Example, Load, load_of, pack_row, pack_tokens
from model.lengths import encoder_frames

# The golden batch: two utterances, three audios of 4, 3 and 2 frames; A is the placeholder.
A = 100
IDS = [[7, A, 1, 2, A, 1], [3, A, 4, 5]]
SUPERVISED = [[False] * 5 + [True], [False, False, True, True]]
FRAMES = [[4, 3], [2]]


@pytest.mark.parametrize("cp, tp, padded, cu_seqlens, longest", [
    (1, 1, [11, 5], [0, 11, 16], 11),
    (2, 1, [12, 8], [0, 12, 20], 12),
    (4, 1, [16, 8], [0, 16, 24], 16),
    (8, 1, [16, 16], [0, 16, 32], 16),
    (1, 3, [11, 7], [0, 11, 18], 11),
    (2, 6, [12, 12], [0, 12, 24], 12),
    (2, 8, [12, 12], [0, 12, 24], 12),
])
def test_golden_lengths(cp, tp, padded, cu_seqlens, longest):
    row = pack_tokens(IDS, SUPERVISED, FRAMES, audio_id=A, multiple=2 * cp if cp > 1 else 1, total_multiple=tp)
    assert row.lengths_U.tolist() == [11, 5]
    assert np.diff(row.cu_seqlens_U1).tolist() == padded
    assert row.cu_seqlens_U1.tolist() == cu_seqlens
    assert row.cu_seqlens_U1.dtype == np.int32
    assert row.max_seqlen == longest
    assert {len(getattr(row, name)) for name in ("tokens_T", "labels_T", "frames_T", "segments_T", "positions_T")} == {cu_seqlens[-1]}


def test_golden_last_utterance_grows_by_whole_multiples():
    row = pack_tokens([[1] * 5] * 2, [[True] * 5] * 2, [[], []], multiple=4, total_multiple=6)
    assert np.diff(row.cu_seqlens_U1).tolist() == [8, 16]


def test_golden_row_without_padding():
    row = pack_tokens(IDS, SUPERVISED, FRAMES, audio_id=A)
    assert row.labels_T.tolist() == [IGNORE] * 9 + [1, IGNORE] + [IGNORE] * 2 + [4, 5, IGNORE]
    assert row.positions_T.tolist() == [*range(11), *range(5)]
    # Golden embeddings: 1 for text, 2, 3 and 4 for the frames of the first, second and third audio.
    embeddings = np.concatenate([np.repeat([2, 3, 4], [4, 3, 2]), [1]])[row.frames_T]
    assert embeddings.tolist() == [1, 2, 2, 2, 2, 1, 1, 3, 3, 3, 1, 1, 4, 4, 1, 1]
    assert row.tokens_T.tolist() == [7, 0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 3, 0, 0, 4, 5]
    assert row.segments_T.tolist() == [0] * 11 + [1] * 5


def test_golden_row_with_padding():
    row = pack_tokens(IDS, SUPERVISED, FRAMES, audio_id=A, multiple=4)
    assert row.labels_T.tolist() == [IGNORE] * 9 + [1] + [IGNORE] * 4 + [4, 5] + [IGNORE] * 4
    assert row.positions_T.tolist() == [*range(12), *range(8)]
    assert row.frames_T.tolist() == [-1, 0, 1, 2, 3, -1, -1, 4, 5, 6, -1, -1, -1, 7, 8, -1, -1, -1, -1, -1]
    assert row.segments_T.tolist() == [0] * 12 + [1] * 8


def test_every_utterance_masked():
    row = pack_tokens(IDS, [[False] * 6, [False] * 4], FRAMES, audio_id=A)
    assert set(row.labels_T.tolist()) == {IGNORE}


def test_audio_is_never_a_target_whatever_the_mask_says():
    row = pack_tokens([[1, A, 2]], [[True, True, True]], [[2]], audio_id=A)
    assert row.labels_T.tolist() == [IGNORE, IGNORE, 2, IGNORE]


def test_end_token_that_is_also_the_padding_is_supervised():
    eos = pad = 0
    row = pack_tokens([[5, 6, eos]], [[False, True, True]], [[]], multiple=4)
    assert row.labels_T.tolist() == [6, eos, IGNORE, IGNORE]
    assert row.tokens_T.tolist() == [5, 6, eos, pad]


@pytest.mark.parametrize("frames, found", [
    ([[4], [2]], "2 audio placeholders but 1 audios"),
    ([[4, 3, 9], [2]], "2 audio placeholders but 3 audios"),
])
def test_missing_or_extra_audio_names_the_utterance(frames, found):
    with pytest.raises(ValueError, match=f"utterance call-7 has {found}"):
        pack_tokens(IDS, SUPERVISED, frames, audio_id=A, names=["call-7", "call-8"])


@pytest.mark.parametrize("ids, supervised", [([[]], [[]]), ([[1, 2]], [[True]])])
def test_empty_utterance_and_wrong_mask_are_refused(ids, supervised):
    with pytest.raises(ValueError, match="utterance 0"):
        pack_tokens(ids, supervised, [[]])


def test_frame_starts_place_the_audio():
    row = pack_tokens(IDS, SUPERVISED, FRAMES, audio_id=A, frame_starts=[[10, 20], [40]])
    assert row.frames_T[row.frames_T >= 0].tolist() == [10, 11, 12, 13, 20, 21, 22, 40, 41]


token = st.integers(0, 50)
samples = st.one_of(st.integers(160, 6000), st.sampled_from([160, 319, 1023, 1024, 1279, 1280, 1281, 2560, 2561]))


@st.composite
def examples(draw):
    number = draw(st.integers(0, 999))
    prompt = [*draw(st.lists(token, max_size=3)), AUDIO, *draw(st.lists(token, max_size=3))]
    answer, end = draw(st.one_of(st.tuples(st.lists(token, min_size=1, max_size=6), st.just([0])), st.just(([], []))))
    wave = np.random.default_rng(number).uniform(0.5, 1.0, draw(samples)).astype(np.float32)  # no zeros: the gaps show
    return Example(f"u{number}", prompt, answer, end, wave)


@settings(deadline=None, max_examples=60)
@given(st.lists(examples(), max_size=5), st.integers(0, 3))
def test_row_holds_every_utterance_exactly(utterances, spare):
    total = sum((load_of(len(u.prompt), len(u.answer), len(u.samples), len(u.end)) for u in utterances), Load())
    size = RowSize(**{key: value + spare + 1 for key, value in dataclasses.asdict(total).items()})
    row = pack_row(utterances, size)
    check_shapes(row, size)
    check_tokens(row, size, utterances)
    check_audio(row, size, utterances)


def check_shapes(row, size):
    letters = {"T": size.tokens, "U": size.utterances, "U1": size.utterances + 1, "A": size.audio_frames, "S": 1280 * size.audio_frames}
    for name, array in row.items():
        suffix = name.rsplit("_", 1)[1]
        assert array.shape == ((size.utterances, size.label_tokens) if suffix == "UL" else (letters[suffix],)), name
        wide = {"segments_T": np.int32, "cu_seqlens_U1": np.int32, "audio_S": np.float32}
        assert array.dtype == wide.get(name, np.int64), name


def check_tokens(row, size, utterances):
    bounds = row["cu_seqlens_U1"]
    for u, utterance in enumerate(utterances):
        slots = slice(bounds[u], bounds[u + 1])
        tokens, labels, frames = (row[name][slots] for name in ("tokens_T", "labels_T", "frames_T"))
        text = [i for i in (*utterance.prompt, *utterance.answer, *utterance.end) if i != AUDIO]
        assert tokens[frames < 0].tolist() == text
        assert (tokens[frames >= 0] == 0).all()
        supervised = [*utterance.answer, *utterance.end]
        assert labels[labels != IGNORE].tolist() == supervised
        assert labels.tolist() == [IGNORE] * (len(tokens) - 1 - len(supervised)) + supervised + [IGNORE]
        before = utterance.prompt.index(AUDIO)
        valid = encoder_frames(len(utterance.samples))
        assert (frames[:before] == -1).all()
        assert frames[before : before + valid].tolist() == [row["audio_starts_U"][u] + f for f in range(valid)]
        assert (frames[before + valid :] == -1).all()
        assert (row["segments_T"][slots] == u).all()
        assert row["positions_T"][slots].tolist() == list(range(len(tokens)))
        assert row["ctc_lengths_U"][u] == len(utterance.answer)
        assert row["ctc_labels_UL"][u].tolist() == [*utterance.answer, *[0] * (size.label_tokens - len(utterance.answer))]
    used = bounds[len(utterances)]
    assert bounds[0] == 0
    assert (bounds[len(utterances) :] == used).all()
    for name, fill in dict(tokens_T=0, labels_T=IGNORE, frames_T=-1, segments_T=size.utterances, positions_T=0).items():
        assert (row[name][used:] == fill).all(), name
    for name in ("audio_starts_U", "audio_samples_U", "audio_lengths_U", "ctc_lengths_U"):
        assert (row[name][len(utterances) :] == 0).all(), name


def check_audio(row, size, utterances):
    starts = [int(start) for start in row["audio_starts_U"][: len(utterances)]]
    places = [*starts, int((row["audio_segments_A"] < size.utterances).sum())]
    audio = row["audio_S"].copy()
    for utterance, start in zip(utterances, starts, strict=True):
        piece = slice(start * 1280, start * 1280 + len(utterance.samples))
        assert np.array_equal(audio[piece], utterance.samples)
        audio[piece] = 0
    assert not audio.any()
    for u, (start, stop) in enumerate(pairwise(places)):
        assert row["audio_samples_U"][u] == len(utterances[u].samples)
        assert row["audio_lengths_U"][u] == encoder_frames(len(utterances[u].samples))
        assert stop - start > row["audio_lengths_U"][u]  # a gap frame
        assert (stop - start) * 1280 >= len(utterances[u].samples) + 256  # the window's reach
        assert (row["audio_segments_A"][start:stop] == u).all()
        assert row["audio_positions_A"][start:stop].tolist() == list(range(stop - start))
    assert (row["audio_segments_A"][places[-1] :] == size.utterances).all()


def test_empty_row():
    size = RowSize(tokens=8, audio_frames=4, utterances=2, utterance_frames=3, label_tokens=5)
    row = pack_row([], size)
    check_shapes(row, size)
    check_tokens(row, size, [])
    check_audio(row, size, [])


@pytest.mark.parametrize("field", ["tokens", "audio_frames", "utterances", "utterance_frames", "label_tokens"])
def test_what_does_not_fit_is_refused(field):
    utterance = Example("long", [AUDIO], [1, 2, 3], [0], ones(5 * 1280))
    exact = dict(tokens=18, audio_frames=12, utterances=2, utterance_frames=5, label_tokens=3)
    pack_row([utterance, utterance], RowSize(**exact))
    with pytest.raises(ValueError, match=f"long.*{field} {exact[field]} > {exact[field] - 1}"):
        pack_row([utterance, utterance], RowSize(**(exact | {field: exact[field] - 1})))


def ones(count):
    return np.ones(count, dtype=np.float32)


def test_load_counts_what_packing_uses():
    utterance = Example("x", [4, AUDIO, 5], [1, 2, 3], [0], ones(3000))
    load = load_of(3, 3, 3000)
    row = pack_row([utterance], RowSize(**dataclasses.asdict(load)))
    assert row["cu_seqlens_U1"].tolist() == [0, load.tokens]
    assert load == Load(tokens=2 + 3 + 3 + 1, audio_frames=4, utterances=1, utterance_frames=3, label_tokens=3)
