"""Text to token ids and back: conversations by their spans, transcripts, and the special tokens that packing needs."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from configs.schema import DataConfig
from data import spm
from data.errors import DataError, UtteranceError
from data.packing import AUDIO
from data.prompts import FORMATS, Format, Span, Turn, spans
from data.settings import given

CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the ids of its special tokens; `encode` adds no special token by itself."""

    backend: tokenizers.Tokenizer
    audio_id: int  # stands where the audio frames go; no row of an embedding belongs to it
    eos_id: int  # ends an answer
    stop_ids: tuple[int, ...]  # end generation: eos_id and the others that a published model may write instead

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, the audio placeholder left out: the fewest rows that an embedding needs."""
        return max(index for index in self.backend.get_vocab().values() if index != self.audio_id) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_next(self, text: str) -> list[int]:
        """Ids of text that follows other text: a leading space is left out where the tokenizer puts one before every text (Llama 2)."""
        return self.encode(text.removeprefix(" ") if self._starts_with_space else text)

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, which no transcript may hold, by id."""
        return {index: token.content for index, token in self.backend.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def _starts_with_space(self) -> bool:
        tokens = self.backend.encode("a", add_special_tokens=False).tokens
        return bool(tokens) and tokens[0].startswith("\u2581")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(cfg: DataConfig) -> Tokenizer:
    """The tokenizer of the configuration; a relative path counts from the working directory, then from the checkout."""
    name = given(cfg, "tokenizer")
    places = [place / name / file for place in (Path(), CHECKOUT) for file in ("", "tokenizer.json", "tokenizer.model")]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        raise DataError(f"data.tokenizer: there is no file {name}; give the path of a tokenizer.json, or of the folder that holds it")
    try:
        backend = spm.read(path) if path.suffix == ".model" else tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        kind = "tokenizer.model" if path.suffix == ".model" else "tokenizer.json"
        raise DataError(f"data.tokenizer: {path} is not a {kind} ({error}); save it with the library that it is of") from error

    audio_id = backend.token_to_id(cfg.audio_token)
    if audio_id is None:  # published language models know nothing of audio
        backend.add_special_tokens([tokenizers.AddedToken(cfg.audio_token, special=True, normalized=False)])
        audio_id = backend.get_vocab()[cfg.audio_token]
    form = prompt_format(cfg)
    eos = form.end if cfg.eos_token is None else cfg.eos_token
    eos_id = backend.token_to_id(eos)
    if eos_id is None:
        raise DataError(f"data.eos_token: {path} has no token {eos!r}; name one that it has, or add this one to it")
    others = (backend.token_to_id(token) for token in form.stops)
    return Tokenizer(backend, audio_id, eos_id, (eos_id, *(i for i in others if i is not None)))


def prompt_format(cfg: DataConfig) -> Format:
    """The prompt format of the configuration."""
    if cfg.prompt_format not in FORMATS:
        raise DataError(f"data.prompt_format is {cfg.prompt_format!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[cfg.prompt_format]


def encode_spans(parts: Sequence[Span], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and, for each, whether it is a target. Spans are encoded one by one: no token reaches over the edge between
    what the model reads and what it writes, so that a prompt has the same ids with and without its answer."""
    ids: list[int] = []
    supervised: list[bool] = []
    for part in parts:
        new = tokenizer.encode_next(part.text) if ids else tokenizer.encode(part.text)
        ids += new
        supervised += [part.supervised] * len(new)
    return ids, supervised


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


def answer_ids(text: str, tokenizer: Tokenizer, form: Format = FORMATS["plain"]) -> list[int]:
    """Ids of a clean transcript as the format has it written, without the end token, all of them ordinary tokens; raises UtteranceError
    where the tokenizer would lose something."""
    if not tokenizer.encode(text):
        raise UtteranceError("bad_text", f"the tokenizer makes no token of the text {text[:40]!r}")
    ids = tokenizer.encode_next(form.lead + text + form.closing)
    if unknown := _unknown(text, tokenizer):
        raise UtteranceError("bad_text", f"text has {unknown!r}, which the tokenizer does not know")
    if special := next((tokenizer.special[index] for index in ids if index in tokenizer.special), None):
        raise UtteranceError("bad_text", f"text contains the special token {special}")
    return ids


def prompt_ids(cfg: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids of everything before an answer, with AUDIO once, where the frames go."""
    turns = [Turn("user", cfg.prompt)]
    try:
        parts = spans(prompt_format(cfg), turns if cfg.system is None else [Turn("system", cfg.system), *turns], cfg.eos_token)
    except ValueError as error:
        raise DataError(f"data.prompt_format={cfg.prompt_format}: {error}") from error
    text = "".join(part.text for part in parts)
    ids, _ = encode_spans(parts, tokenizer)
    if ids.count(tokenizer.audio_id) != 1:
        audio = tokenizer.backend.id_to_token(tokenizer.audio_id)
        raise DataError(f"data.prompt: {cfg.prompt!r} holds {audio} {ids.count(tokenizer.audio_id)} times; it must be there once")
    if unknown := _unknown(text, tokenizer):
        raise DataError(f"data.prompt: the tokenizer does not know {unknown!r}; use other words or another data.prompt_format")
    return [AUDIO if index == tokenizer.audio_id else index for index in ids]


def _unknown(text: str, tokenizer: Tokenizer) -> str:
    """The first part of `text` that becomes the unknown token; empty if there is none."""
    token = getattr(tokenizer.backend.model, "unk_token", None)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    if token is None or token not in encoding.tokens:
        return ""
    start, stop = encoding.offsets[encoding.tokens.index(token)]
    return text[start:stop]
