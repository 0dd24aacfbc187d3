"""Models of sentencepiece, read here, against sentencepiece: ids and text."""

from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataConfig
from data import spm
from data.errors import DataError
from data.tokenizer import load_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "  two  spaces, and a tab\tthere ", "ﬁne № ½ \uff26\uff55ll café", "zebra ∑ 你好",
         "twelve", "a"]
KINDS: dict[str, dict[str, Any]] = {
    "unigram": dict(model_type="unigram", vocab_size=60),
    "unigram with bytes": dict(model_type="unigram", vocab_size=320, byte_fallback=True, add_dummy_prefix=False),
    "bpe as llama": dict(model_type="bpe", vocab_size=330, byte_fallback=True, normalization_rule_name="identity",
                         remove_extra_whitespaces=False),
    "bpe": dict(model_type="bpe", vocab_size=60, user_defined_symbols=["<|audio|>"]),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(TEXTS[:1] * 4 + ["the dog and the fox", "two dogs jump", "twelve foxes are there, a dozen"] * 3))
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), hard_vocab_limit=False,
                                             minloglevel=2, **KINDS[request.param])
    return folder / "tokenizer.model"


def test_ids_and_text_are_those_of_sentencepiece(model: Path) -> None:
    theirs = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(model))
    ours = spm.read(model)
    assert ours.get_vocab_size() == theirs.vocab_size()
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, (text, ours.encode(text).tokens, theirs.id_to_piece(ids))
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.token_to_id("</s>") == theirs.eos_id()


def test_a_folder_with_such_a_file_is_a_tokenizer(model: Path) -> None:
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(model.parent), prompt_format="llama2"))
    assert tokenizer.decode([*tokenizer.encode("the quick fox"), tokenizer.eos_id]) == "the quick fox"
    assert tokenizer.audio_id == tokenizer.backend.token_to_id("<|audio|>")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03abc")
    with pytest.raises(DataError, match=r"tokenizer.model is not a tokenizer.model \(it is no sentencepiece model\)"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path)))
