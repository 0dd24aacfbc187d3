"""Prompts of whole recordings: what does not fit a row is cut into pieces at quiet moments, which are transcribed one by one."""

import math
from dataclasses import dataclass, replace

import numpy as np

from configs.schema import DataConfig, RowSize
from data.audio import count_samples, read_audio
from data.errors import UtteranceError
from data.manifest import Segment, Utterance
from data.packing import load_of
from data.settings import row_sizes
from data.sources import Item, Source
from model.lengths import FRAME_SAMPLES

REACH = 0.1  # how far a cut may be moved to a quiet moment, as a share of the longest piece
MAX_REACH_SEC = 1.0
QUIET_SEC = 0.02  # length of the moments whose loudness is compared


@dataclass(frozen=True)
class PieceSource:
    """Another source's prompts without answers, the audio of each in pieces that fit the largest row."""

    source: Source
    cfg: DataConfig
    places: tuple[tuple[int, int, int], ...]  # number of the utterance, of the piece, and of its pieces
    longest_sec: float

    def __len__(self) -> int:
        return len(self.places)

    def item(self, index: int, step: int = 0) -> Item:
        utterance, piece, pieces = self.places[index]
        item = self.source.item(utterance).without_answer()
        return item if pieces == 1 else _piece(item, piece, pieces, self.longest_sec, self.cfg)


def in_pieces(source: Source, cfg: DataConfig) -> PieceSource:
    """The prompts of a finite source. An utterance with a fault keeps its place, where the fault shows again."""
    largest, places, longest_sec = row_sizes(cfg)[-1], [], math.inf
    for index in range(len(source)):
        pieces = 1
        try:
            item = source.item(index)
            if isinstance(item.audio, Utterance) and item.without_answer().load.excess(largest):
                longest_sec = longest_samples(len(item.prompt), largest, cfg.encoder, cfg.queries) / cfg.sample_rate
                pieces = _count(item.audio.duration_sec, longest_sec)
        except UtteranceError:
            pass
        places += [(index, piece, pieces) for piece in range(pieces)]
    return PieceSource(source, cfg, tuple(places), longest_sec)


def longest_samples(prompt_tokens: int, row: RowSize, encoder: str, queries: int = 0) -> int:
    """Most samples of an utterance without an answer that fits the row."""
    low, high = 0, row.audio_frames * FRAME_SAMPLES
    while low < high:
        middle = (low + high + 1) // 2
        fits = not load_of(prompt_tokens, 0, middle, 0, encoder, queries=queries).excess(row)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _reach(longest_sec: float) -> float:
    return min(REACH * longest_sec, MAX_REACH_SEC)


def _count(duration_sec: float, longest_sec: float) -> int:
    """Pieces of equal length, each with a reach to spare at both ends."""
    return max(1, math.ceil(duration_sec / max(longest_sec - 2 * _reach(longest_sec), QUIET_SEC)))


def _piece(item: Item, piece: int, pieces: int, longest_sec: float, cfg: DataConfig) -> Item:
    assert isinstance(item.audio, Utterance)
    whole = item.audio
    start_sec, end_sec = (_cut_sec(whole, number, pieces, _reach(longest_sec), cfg) for number in (piece, piece + 1))
    audio = _part(whole, start_sec, end_sec - start_sec)
    load = load_of(len(item.prompt), 0, count_samples(audio.duration_sec, cfg.sample_rate), 0, cfg.encoder, queries=cfg.queries)
    return replace(item, load=load, audio=audio, piece=piece)


def _cut_sec(whole: Utterance, number: int, pieces: int, reach_sec: float, cfg: DataConfig) -> float:
    """Where piece `number` begins: the middle of the quietest moment near that share of the whole."""
    even_sec = whole.duration_sec * number / pieces
    if number in (0, pieces):
        return even_sec
    around = _part(whole, even_sec - reach_sec, 2 * reach_sec)
    samples, width = read_audio(around, cfg.sample_rate, cfg.channels), count_samples(QUIET_SEC, cfg.sample_rate)
    loudness = [float(np.square(moment).sum()) for moment in np.split(samples[: len(samples) // width * width], len(samples) // width)]
    cut_sec = even_sec - reach_sec + (int(np.argmin(loudness)) + 0.5) * QUIET_SEC
    return count_samples(cut_sec, cfg.sample_rate) / cfg.sample_rate


def _part(whole: Utterance, offset_sec: float, duration_sec: float) -> Utterance:
    """A stretch of an utterance, which keeps its name."""
    if isinstance(whole.audio, Segment):
        audio = replace(whole.audio, offset_sec=whole.audio.offset_sec + offset_sec, duration_sec=duration_sec)
        return replace(whole, duration_sec=duration_sec, audio=audio)
    return replace(whole, duration_sec=duration_sec, audio=whole.audio.truncate(offset=offset_sec, duration=duration_sec))
