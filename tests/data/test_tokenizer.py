import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from data.errors import DataError, UtteranceError
from data.make_tokenizer import subword_tokenizer, transcripts
from data.packing import AUDIO
from data.tokenizer import answer_ids, clean_text, load_tokenizer, prompt_ids
from tests.data.files import TOKENIZER, config


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(config())


def test_embedded_tokenizer_is_what_the_script_writes(tokenizer):
    assert json.loads(subword_tokenizer(transcripts()).to_str()) == json.loads(tokenizer.backend.to_str())


def test_special_tokens_are_distinct_and_the_vocabulary_is_dense(tokenizer):
    assert tokenizer.stop_ids == (tokenizer.eos_id,) != (tokenizer.audio_id,)
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab())


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789 '", min_size=1))
def test_round_trip(text):
    tokenizer = load_tokenizer(config())
    ids = tokenizer.encode(text)
    assert len(ids) <= len(text)
    assert tokenizer.decode(ids) == text


def test_subwords_are_parts_of_words(tokenizer):
    """Merges of frequent letters, with the space before them; no number between twelve and twenty, nor a ten, is one token."""
    tokens = [[tokenizer.decode([i]) for i in tokenizer.encode(text)] for text in ("six sixteen", "eleven seventy")]
    assert tokens == [["s", "i", "x", " six", "teen"], ["ele", "v", "en", " sevent", "y"]]


def test_case_is_folded_and_special_tokens_are_not_decoded(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("One Two"), tokenizer.eos_id, tokenizer.audio_id]) == "one two"


def test_prompt_marks_the_audio(tokenizer):
    assert prompt_ids(config(prompt="a<|audio|>b"), tokenizer) == [*tokenizer.encode("a"), AUDIO, *tokenizer.encode("b")]


@pytest.mark.parametrize("prompt, times", [("say it", 0), ("<|audio|><|audio|>", 2)])
def test_prompt_holds_the_audio_once(tokenizer, prompt, times):
    with pytest.raises(DataError, match=f"data.prompt.*{times} times"):
        prompt_ids(config(prompt=prompt), tokenizer)


def test_prompt_of_unknown_characters_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"data\.prompt: the tokenizer does not know ':'"):
        prompt_ids(config(prompt="say: <|audio|>"), tokenizer)


def test_an_audio_token_that_is_missing_is_added_and_needs_no_row_of_the_embedding(tokenizer):
    other = load_tokenizer(config(audio_token="<speech>"))
    assert other.audio_id == other.vocab_size == tokenizer.vocab_size
    assert prompt_ids(config(audio_token="<speech>", prompt="a<speech>"), other) == [*tokenizer.encode("a"), AUDIO]


def test_a_folder_with_a_tokenizer_will_do(tokenizer):
    other = load_tokenizer(config(tokenizer=str(Path(TOKENIZER).parent)))
    assert other.backend.to_str() == tokenizer.backend.to_str()


@pytest.mark.parametrize("text", [None, float("nan"), 123, ["a"], {}])
def test_what_is_not_a_string_is_bad_text(text):
    with pytest.raises(UtteranceError, match="not a string") as error:
        clean_text(text)
    assert error.value.reason == "bad_text"


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "\u200b", "\u200b \ufeff", "\u0000"])
def test_invisible_text_is_empty(text):
    with pytest.raises(UtteranceError, match="empty"):
        clean_text(text)


def test_lone_surrogate_is_bad_text():
    with pytest.raises(UtteranceError, match="surrogate at character 2"):
        clean_text("ab\ud800")


def test_equivalent_spellings_become_one():
    assert clean_text("caf\u0065\u0301") == clean_text("caf\u00e9") == "caf\u00e9"


@pytest.mark.parametrize("text", ["مرحبا hello", "ok 🙂", "a" * 50_000, "two  spaces"])
def test_other_text_is_kept(text):
    assert clean_text(f" {text}\n") == text


@pytest.mark.parametrize("text, what", [("ok 🙂", "'🙂'"), ("مرحبا", "'م"), ("caf\u00e9", "'\u00e9'")])
def test_characters_that_the_tokenizer_would_lose_are_named(tokenizer, text, what):
    with pytest.raises(UtteranceError, match=f"text has {what}") as error:
        answer_ids(text, tokenizer)
    assert error.value.reason == "bad_text"


@pytest.mark.parametrize("name", ["audio", "eos", "pad"])
def test_special_tokens_in_a_transcript_are_refused(tokenizer, name):
    with pytest.raises(UtteranceError, match=rf"contains the special token <\|{name}\|>"):
        answer_ids(f"one <|{name}|> two", tokenizer)


def test_missing_file_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match=r"data\.tokenizer: there is no file .*missing\.json; give the path"):
        load_tokenizer(config(tokenizer=str(tmp_path / "missing.json")))


def test_unset_tokenizer_says_how_to_set_it():
    with pytest.raises(DataError, match=r"data\.tokenizer is not set; give it as data\.tokenizer=VALUE"):
        load_tokenizer(config(tokenizer="???"))


def test_other_file_is_not_a_tokenizer(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json is not a tokenizer\.json"):
        load_tokenizer(config(tokenizer=str(tmp_path / "x.json")))


@pytest.mark.parametrize("changes, token", [({"eos_token": "<|none|>"}, r"<\|none\|>"), ({"prompt_format": "qwen"}, r"<\|im_end\|>")])
def test_missing_end_token_names_key_and_file(changes, token):
    with pytest.raises(DataError, match=rf"data\.eos_token: .*tokenizer\.json has no token '{token}'"):
        load_tokenizer(config(None, **changes))


def test_unknown_format_names_those_that_exist():
    with pytest.raises(DataError, match=r"data\.prompt_format is 'qwn'; choose one of plain, .*qwen3"):
        load_tokenizer(config(None, prompt_format="qwn"))


def test_relative_path_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_tokenizer(config(tokenizer="data/speech/tokenizer.json"))
    assert found.backend.to_str() == load_tokenizer(config(tokenizer=TOKENIZER)).backend.to_str()


def test_text_without_any_token_is_bad_text(tokenizer, tmp_path):
    backend = Backend(models.BPE(vocab={"a": 0, "<|audio|>": 1, "<|eos|>": 2, "<|pad|>": 3}, merges=[]))
    backend.add_special_tokens(["<|audio|>", "<|eos|>", "<|pad|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    other = load_tokenizer(config(tokenizer=str(tmp_path / "tokenizer.json")))
    with pytest.raises(UtteranceError, match="makes no token of the text 'zz'"):
        answer_ids("zz", other)
