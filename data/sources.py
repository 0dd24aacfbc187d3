"""Where utterances come from: a manifest, a file of text, the digit strings. An Item is all that planning needs."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from configs.schema import DataConfig
from data import digits
from data.audio import count_samples, read_audio
from data.errors import DataError, UtteranceError
from data.manifest import Manifest, Utterance, read_manifest, transcript
from data.packing import Example, Load, load_of
from data.prompts import Format, Turn, spans
from data.settings import check, given, row_sizes
from data.tokenizer import Tokenizer, answer_ids, encode_spans, load_tokenizer, prompt_format, prompt_ids


@dataclass(frozen=True)
class Item:
    """One utterance before its audio is read."""

    id: str
    text: str
    prompt: tuple[int, ...]  # with AUDIO once, or of a text without it
    answer: tuple[int, ...]
    end: tuple[int, ...]
    load: Load
    audio: Utterance | digits.DigitString
    piece: int = 0  # number of this part of an utterance that was cut

    def without_answer(self) -> "Item":
        """The prompt alone."""
        load = replace(self.load, tokens=self.load.tokens - len(self.answer) - len(self.end), label_tokens=0)
        return replace(self, answer=(), end=(), load=load)


class Source(Protocol):
    """Utterances by number."""

    def item(self, index: int, step: int = 0) -> Item:
        """Utterance `index`; of an endless source it may depend on the optimizer step. Raises UtteranceError for text it refuses."""

    def __len__(self) -> int:
        """Utterances of an epoch; 0 if endless."""


@dataclass(frozen=True)
class Writer:
    """Tokens around a transcript."""

    tokenizer: Tokenizer
    form: Format
    prompt: tuple[int, ...]
    encoder: str  # which counts audio tokens
    queries: int = 0  # or so many
    system: str | None = None  # of a text with a prompt of its own
    eos: str | None = None
    multiple: int = 1  # of the slots that an utterance takes

    def item(self, name: str, text: str, samples: int, audio: Utterance | digits.DigitString) -> Item:
        """The item of a clean transcript; raises UtteranceError for text that the tokenizer would not keep."""
        answer = tuple(answer_ids(text, self.tokenizer, self.form))
        load = load_of(len(self.prompt), len(answer), samples, encoder=self.encoder, multiple=self.multiple, queries=self.queries)
        return Item(name, text, self.prompt, answer, (self.tokenizer.eos_id,), load, audio)


    def text_item(self, utterance: Utterance, text: str) -> Item:
        """The item of a text: all of it is learnt, or what answers its prompt."""
        question = utterance.extra["prompt"]
        if question is None:
            prompt = self.tokenizer.encode(self.form.begin) if self.form.begin else []
        else:
            turns = [Turn("system", self.system)] if self.system is not None else []
            prompt, _ = encode_spans(spans(self.form, [*turns, Turn("user", question)], self.eos), self.tokenizer)
        return replace(self, prompt=tuple(prompt)).item(utterance.id, text, 0, utterance)


def writer(cfg: DataConfig) -> Writer:
    """Tokenizer and prompt of the configuration."""
    tokenizer = load_tokenizer(cfg)
    if cfg.kind == "text":
        return Writer(tokenizer, prompt_format(cfg), (), "none", 0, cfg.system, cfg.eos_token, cfg.multiple)
    return Writer(tokenizer, prompt_format(cfg), tuple(prompt_ids(cfg, tokenizer)), cfg.encoder, cfg.queries, multiple=cfg.multiple)


@dataclass(frozen=True)
class ManifestSource:
    """The lines of a manifest."""

    manifest: Manifest
    writer: Writer
    sample_rate: int

    def __len__(self) -> int:
        return len(self.manifest)

    def item(self, index: int, step: int = 0) -> Item:
        utterance = self.manifest[index]
        text = transcript(utterance)
        try:
            if self.manifest.text_only:
                return self.writer.text_item(utterance, text)
            return self.writer.item(utterance.id, text, count_samples(utterance.duration_sec, self.sample_rate), utterance)
        except UtteranceError as error:
            raise utterance.fault(error.reason, str(error)) from error


@dataclass(frozen=True)
class DigitSource:
    """Endless training strings."""

    writer: Writer
    seed: int
    min_words: int
    max_words: int
    curriculum_steps: int

    def __len__(self) -> int:
        return 0

    def item(self, index: int, step: int = 0) -> Item:
        fewest, most = digits.curriculum(step, self.curriculum_steps, self.min_words, self.max_words)
        string = digits.train_string(self.seed, index, fewest, most, self.min_words)
        return digit_item(f"string-{index}", string, self.writer)


@dataclass(frozen=True)
class FixedSource:
    """A list of items: the held-out strings."""

    items: tuple[Item, ...]

    def __len__(self) -> int:
        return len(self.items)

    def item(self, index: int, step: int = 0) -> Item:
        return self.items[index]


def digit_item(name: str, string: digits.DigitString, written: Writer) -> Item:
    """The item of a digit string."""
    return written.item(name, string.text, digits.count_samples(string), string)


def training_source(cfg: DataConfig, seed: int) -> ManifestSource | DigitSource:
    """The source of the training utterances; every fault that can be found without reading audio is found here."""
    check(cfg)
    written = writer(cfg)
    if cfg.kind != "digits":
        manifest = read_manifest(given(cfg, "manifest"), cfg.on_bad_text, cfg.kind == "text")
        return ManifestSource(manifest, written, cfg.sample_rate)
    _check_longest_string(cfg, written)
    return DigitSource(written, seed, cfg.min_words, cfg.max_words, cfg.curriculum_steps)


def validation_source(cfg: DataConfig, name: str) -> ManifestSource | FixedSource:
    """The source of a validation set, one of validation_names(cfg)."""
    check(cfg)
    if name not in validation_names(cfg):
        raise DataError(f"data.validation has no set {name!r} (has: {', '.join(validation_names(cfg)) or 'none'})")
    written = writer(cfg)
    if cfg.kind != "digits":
        return ManifestSource(read_manifest(cfg.validation[name], cfg.on_bad_text, cfg.kind == "text"), written, cfg.sample_rate)
    _check_longest_string(cfg, written)
    strings = digits.held_out_strings(cfg.validation_utterances, cfg.min_words, cfg.max_words)
    return FixedSource(tuple(digit_item(f"held_out-{i}", string, written) for i, string in enumerate(strings)))


def validation_names(cfg: DataConfig) -> list[str]:
    """Names of the validation sets."""
    return ["held_out"] if cfg.kind == "digits" else list(cfg.validation)


def example(item: Item, cfg: DataConfig) -> Example:
    """Reads the audio of an item; raises UtteranceError if it cannot be used."""
    if isinstance(item.audio, digits.DigitString):
        samples = digits.render(item.audio)
    elif item.audio.audio is None:
        samples = np.zeros(0, dtype=np.float32)
    else:
        samples = read_audio(item.audio, cfg.sample_rate, cfg.channels)
    return Example(item.id, item.prompt, item.answer, item.end, samples)


def _check_longest_string(cfg: DataConfig, written: Writer) -> None:
    samples = digits.longest_samples(cfg.max_words)
    first, other = (max(digits.WORDS, key=lambda word: len(written.tokenizer.encode(before + word))) for before in ("", "zero "))
    tokens = len(answer_ids(" ".join([first, *[other] * (cfg.max_words - 1)]), written.tokenizer, written.form))
    load = load_of(len(written.prompt), tokens, samples, encoder=cfg.encoder, multiple=cfg.multiple, queries=cfg.queries)
    excess = load.excess(row_sizes(cfg)[-1])
    if excess:
        raise DataError(f"data.rows: a string of data.max_words={cfg.max_words} words can exceed the largest row ({excess}); enlarge it")


def indices(count: int, seed: int, epoch: int, rank: int, world: int, shuffle: bool) -> np.ndarray:
    """Utterances of one rank in one epoch, in order: every world-th of a permutation that all ranks share."""
    order = np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)
    return order[rank::world]
