"""Text to token ids and back, with the three special tokens that packing needs."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from configs.schema import DataConfig
from data.errors import DataError, UtteranceError
from data.packing import AUDIO
from data.settings import given

CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json and the ids of its special tokens; `encode` adds no special token by itself."""

    backend: tokenizers.Tokenizer
    audio_id: int  # stands where the audio frames go
    eos_id: int  # ends an answer
    pad_id: int  # fills unused slots of generated rows; may equal eos_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: the fewest rows that an embedding needs."""
        return max(self.backend.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(cfg: DataConfig) -> Tokenizer:
    """The tokenizer of the configuration; a relative path counts from the working directory, then from the checkout."""
    name = given(cfg, "tokenizer")
    path = next((p for p in (Path(name), CHECKOUT / name) if p.is_file()), None)
    if path is None:
        raise DataError(f"data.tokenizer: there is no file {name}; give the path of a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"data.tokenizer: {path} is not a tokenizer.json ({error}); save it with the tokenizers library") from error

    def special(key: str) -> int:
        token = getattr(cfg, key)
        index = backend.token_to_id(token)
        if index is None:
            raise DataError(f"data.{key}: {path} has no token {token!r}; name one that it has, or add this one to it")
        return index

    return Tokenizer(backend, special("audio_token"), special("eos_token"), special("pad_token"))


def clean_text(text: Any) -> str:
    """A transcript in composed Unicode without surrounding space; raises UtteranceError for what is not text."""
    if not isinstance(text, str):
        raise UtteranceError("bad_text", f"text is {text!r}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UtteranceError("bad_text", f"text has a lone surrogate at character {error.start}") from error
    text = unicodedata.normalize("NFC", text).strip()
    if all(unicodedata.category(character)[0] in "ZC" for character in text):
        raise UtteranceError("bad_text", "text is empty")
    return text


def answer_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a clean transcript, all of them ordinary tokens; raises UtteranceError where the tokenizer would lose something."""
    ids = tokenizer.encode(text)
    if not ids:
        raise UtteranceError("bad_text", f"the tokenizer makes no token of the text {text[:40]!r}")
    for name in ("audio", "eos", "pad"):
        if getattr(tokenizer, f"{name}_id") in ids:
            raise UtteranceError("bad_text", f"text contains the {name} token")
    if unknown := _unknown(text, tokenizer):
        raise UtteranceError("bad_text", f"text has {unknown!r}, which the tokenizer does not know")
    return ids


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of the prompt, with AUDIO once, where the frames go."""
    ids = tokenizer.encode(prompt)
    if ids.count(tokenizer.audio_id) != 1:
        audio = tokenizer.backend.id_to_token(tokenizer.audio_id)
        raise DataError(f"data.prompt: {prompt!r} holds {audio} {ids.count(tokenizer.audio_id)} times; it must be there once")
    if unknown := _unknown(prompt, tokenizer):
        raise DataError(f"data.prompt: the tokenizer does not know {unknown!r}; use other words")
    return [AUDIO if index == tokenizer.audio_id else index for index in ids]


def _unknown(text: str, tokenizer: Tokenizer) -> str:
    """The first part of `text` that becomes the unknown token; empty if there is none."""
    token = getattr(tokenizer.backend.model, "unk_token", None)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    if token is None or token not in encoding.tokens:
        return ""
    start, stop = encoding.offsets[encoding.tokens.index(token)]
    return text[start:stop]
