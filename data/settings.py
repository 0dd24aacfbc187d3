"""The data configuration: mandatory values, allowed choices, row sizes."""

from dataclasses import fields
from itertools import pairwise
from typing import Any

from configs.schema import DataConfig, RowSize
from data.errors import REASONS, DataError

_CHOICES = {
    "kind": ("manifest", "text", "digits"), "channels": ("mean", "first", "error"),
    **{f"on_{reason}": ("fail", "skip") for reason in REASONS},
}


def given(cfg: DataConfig, key: str) -> Any:
    """A mandatory value, or one sentence that says how to give it."""
    try:
        value = getattr(cfg, key)
    except Exception:  # OmegaConf's own, for a missing value
        value = "???"
    if value == "???":
        raise DataError(f"data.{key} is not set; give it as data.{key}=VALUE")
    return value


def row_sizes(cfg: DataConfig) -> list[RowSize]:
    """The allowed row sizes as plain integers, smallest first."""
    names = [f.name for f in fields(RowSize)]
    return [RowSize(**{name: int(getattr(row, name)) for name in names}) for row in cfg.rows]


def check(cfg: DataConfig) -> None:
    """Refuses values that no run can have."""
    for key, allowed in _CHOICES.items():
        if getattr(cfg, key) not in allowed:
            raise DataError(f"data.{key} is {getattr(cfg, key)!r}; it can be {' or '.join(allowed)}")
    if not 1 <= cfg.min_words <= cfg.max_words:
        raise DataError(f"data.min_words is {cfg.min_words} and data.max_words {cfg.max_words}; it must be 1 <= min_words <= max_words")
    rows = row_sizes(cfg)
    needed = ("tokens", "utterances") if cfg.kind == "text" else tuple(f.name for f in fields(RowSize))
    if not rows or min(getattr(row, name) for row in rows for name in needed) < 1:
        raise DataError(f"data.rows is {rows}; give at least one row size, of numbers above 0")
    for small, large in pairwise(rows):
        if any(value > getattr(large, key) for key, value in vars(small).items()):
            raise DataError(f"data.rows: {small} is not within {large}; order them by size, each within the next")
