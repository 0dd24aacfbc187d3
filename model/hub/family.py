"""What the hub knows of a family of models: its rows and how its config.json says what our configuration says."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.schema import ModelConfig
from model import speech_lm
from model.hub.rows import Block, Row, blocks, match
from model.params import P, named_leaves


class HubError(ValueError):
    """A checkpoint that cannot be read or written; the message says everything that is wrong, where, and what to do."""


@dataclass(frozen=True)
class Entry:
    """One of our tensors and the foreign ones that make it up."""

    path: str
    p: P
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Family:
    """A family of published models.

    :param part: prefixes of our paths that its checkpoints hold
    :param variants: the names that its checkpoints use; an export writes the first
    :param read: config.json -> our configuration; raises HubError
    :param write: the inverse; keys that say nothing about shapes or formulas may be missing
    :param left_out: patterns of foreign tensors that are left out knowingly, and why
    :param without: keys of config.json that say that something left out is there, and the value that says that it is not
    :param alone: keys of config.json that only a model says which is written like no other
    :param one_file: whether its owner opens model.safetensors alone, and no index of several files
    """

    name: str
    model_type: str
    architecture: str
    part: tuple[str, ...]
    variants: tuple[tuple[Row, ...], ...]
    read: Callable[[Mapping[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    one_file: bool = False


def entries(rows: Sequence[Row], cfg: ModelConfig, part: tuple[str, ...]) -> Iterator[Entry]:
    """Our tensors under the prefixes `part` in tree order, with their foreign ones."""
    for path, p in named_leaves(speech_lm.model_spec(cfg)):
        if not path.startswith(part):
            continue
        found = match(rows, path)
        if found is None:
            raise HubError(f"the layout has no place for {path}; change the model's configuration or use another family")
        yield Entry(path, p, tuple(blocks(*found, p, cfg)))


def layouts(family: Family, cfg: ModelConfig) -> list[list[Entry]]:
    """The entries in each variant that has a place for every tensor; raises HubError if none has."""
    found, lost = [], HubError(f"{family.name} has no variant")
    for rows in family.variants:
        try:
            found.append(list(entries(rows, cfg, family.part)))
        except HubError as error:
            lost = error
    if not found:
        raise lost
    return found


def choose_variant(family: Family, cfg: ModelConfig, stored: Mapping[str, Any]) -> list[Entry]:
    """The entries of the variant whose names the checkpoint holds most of."""
    return max(layouts(family, cfg), key=lambda c: sum(b.name in stored for e in c for b in e.blocks))


def matched(family: Family, cfg: ModelConfig, stored: Mapping[str, Sequence[int]]) -> tuple[list[Entry], list[str]]:
    """The entries of the variant that a checkpoint is stored in, and what is left out knowingly; raises HubError as compare does."""
    found = choose_variant(family, cfg, stored)
    return found, compare(family, cfg, found, stored)


def compare(family: Family, cfg: ModelConfig, found: Sequence[Entry], stored: Mapping[str, Sequence[int]]) -> list[str]:
    """What is left out knowingly, one sentence a reason.

    :param stored: shape of every foreign tensor that there is
    :raises HubError: with every missing, extra and mis-shaped tensor
    """
    wanted = {b.name: b.shape for e in found for b in e.blocks}
    left_out = dict(family.left_out)
    if cfg.decoder.tie_embeddings:
        left_out[r"(.*\.)?lm_head\.weight"] = "the head is the embedding"
    extra = [name for name in stored if name not in wanted]
    notes, excused = [], set()
    for pattern, reason in left_out.items():
        names = [name for name in extra if re.fullmatch(pattern, name)]
        excused.update(names)
        if names:
            notes.append(f"left out {len(names)} tensors like {names[0]}: {reason}")
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in stored]
    problems += [f"extra {name} {list(stored[name])}" for name in extra if name not in excused]
    problems += [f"{name} is {list(stored[name])} and should be {list(shape)}" for name, shape in wanted.items()
                 if name in stored and tuple(stored[name]) != shape]
    if problems:
        raise HubError(f"the checkpoint is not the {family.name} that its configuration describes: " + "; ".join(problems))
    return notes
