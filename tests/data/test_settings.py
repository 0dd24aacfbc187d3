import itertools
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.schema import DataConfig, RowSize
from data.errors import DataError
from data.loader import make_loader
from data.tokenizer import CHECKOUT
from tests.data.files import TOKENIZER, config, digit_config, speech_manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return speech_manifest(tmp_path_factory.mktemp("speech"), 2)


BAD = [
    ({"kind": "tape"}, r"data\.kind is 'tape'; it can be manifest or text or digits"),
    ({"channels": "left"}, r"data\.channels is 'left'; it can be mean or first or error"),
    ({"on_bad_audio": "ignore"}, r"data\.on_bad_audio is 'ignore'; it can be fail or skip"),
    ({"on_bad_text": "ignore"}, r"data\.on_bad_text is 'ignore'"),
    ({"on_too_long": "split"}, r"data\.on_too_long is 'split'"),
    ({"rows": []}, r"data\.rows is \[\]"),
    ({"rows": [RowSize(0, 1, 1, 1, 1)]}, r"numbers above 0"),
    ({"rows": [RowSize(20, 20, 2, 5, 5), RowSize(40, 10, 2, 5, 5)]}, r"order them by size"),
    ({"min_words": 5, "max_words": 4}, r"data\.min_words is 5 and data\.max_words 4"),
    ({"min_words": 0}, r"data\.min_words is 0"),
    ({"manifest": "???"}, r"data\.manifest is not set; give it as data\.manifest=VALUE"),
    ({"prompt": "no audio"}, r"data\.prompt"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_impossible_settings_are_refused_at_once(manifest, change, message):
    with pytest.raises(DataError, match=message):
        make_loader(config(**({"manifest": manifest} | change)), 0, 0, 1)


@pytest.mark.parametrize("change, excess", [
    ({"utterance_frames": 139}, "utterance_frames 140 > 139"),
    ({"label_tokens": 28}, "label_tokens 29 > 28"),  # seventeen, at the start of 5 tokens, then six times eleven, of 4
])
def test_rows_shorter_than_the_longest_string_are_refused_at_once(change, excess):
    size = {"tokens": 450, "audio_frames": 330, "utterances": 5, "utterance_frames": 140, "label_tokens": 29}
    make_loader(digit_config(rows=[RowSize(**size)]), 0, 0, 1)
    with pytest.raises(DataError, match=f"a string of data.max_words=7 words can exceed the largest row.*{excess}"):
        make_loader(digit_config(rows=[RowSize(**(size | change))]), 0, 0, 1)


def shipped(name: str) -> Any:
    return OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(CHECKOUT / f"configs/data/{name}.yaml"))


@pytest.mark.parametrize("name", ["digits", "manifest"])
def test_shipped_configurations_are_valid(name, manifest):
    """They fit the schema, and the row is large enough for what they describe."""
    values = shipped(name)
    values.workers = 0
    if name == "manifest":
        with pytest.raises(DataError, match=r"data\.tokenizer is not set"):
            make_loader(values, 0, 0, 1)
        values.tokenizer = TOKENIZER
        with pytest.raises(DataError, match=r"data\.manifest is not set"):
            make_loader(values, 0, 0, 1)
        values.manifest = str(manifest)
    batch = next(make_loader(values, 0, 0, 1))
    assert len(batch["tokens_T"]) == values.rows[0].tokens


def test_the_demo_fills_its_rows():
    values = shipped("digits")
    values.workers, values.curriculum_steps = 0, 0
    batches = list(itertools.islice(make_loader(values, 0, 0, 1), 10))
    assert sum(batch["fill"] for batch in batches) > 9.4
    assert 15 <= sum(len(batch["ids"]) for batch in batches) / 10 <= 17
