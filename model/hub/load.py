"""Reads a published checkpoint into sharded parameters, each rank its own bytes alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import ModelConfig
from model.hub.families import family_of
from model.hub.family import Entry, Family, HubError, matched
from model.hub.files import opened, read_content
from model.hub.rows import Block
from model.hub.source import Source
from model.params import P
from parallel import sharding
from parallel.mesh import Mesh

Box = Sequence[tuple[int, int]]  # start and length in each dimension


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, by our dotted paths: DTensors, and plain tensors for buffers."""

    family: Family
    cfg: ModelConfig
    tensors: dict[str, Any]
    notes: list[str]  # what was left out knowingly


def read_config(path: Path) -> tuple[Family, ModelConfig]:
    """Family and configuration of a folder or a .nemo file."""
    content = read_content(path)
    family = family_of(content)
    return family, family.read(content)


def load(path: Path, mesh: Mesh, cfg: ModelConfig | None = None, dtype: torch.dtype = torch.float32,
         part: tuple[str, ...] = ("",)) -> Loaded:
    """The checkpoint as parameters of `dtype` (fp32 or wider) sharded over `mesh`.

    :param path: a Hugging Face folder, one of NeMo's SALM, or a .nemo file, unpacked or not
    :param cfg: the model to fill, where it differs from the checkpoint's own configuration in what no tensor of it shows
    :param part: beginnings of our paths to take; the rest is only checked
    :raises HubError: with everything that does not fit
    """
    family, own = read_config(path)
    cfg = own if cfg is None else cfg
    with opened(path) as folder:
        found, notes = matched(family, cfg, folder.shapes())
        if cfg.decoder.tie_embeddings:
            _check_tie(folder, found, mesh)
        tensors = {entry.path: _place(entry.p, read_box(folder, entry, sharding.local_box(entry.p, mesh)).to(dtype), mesh)
                   for entry in found if entry.path.startswith(part)}
    return Loaded(family, cfg, tensors, notes)


def _check_tie(folder: Source, found: Sequence[Entry], mesh: Mesh) -> None:
    """A head that is stored beside the embedding that it is tied to must hold the same numbers: else one of the two would be lost."""
    embedding = next((e for e in found if e.path == "decoder.embedding.weight"), None)
    if embedding is None:
        return
    box, block = sharding.local_box(embedding.p, mesh), embedding.blocks[0]
    heads = [name for name in folder.shapes() if name.endswith("lm_head.weight") and name != block.name]
    if not heads:
        return
    tied = Entry(embedding.path, embedding.p, (replace(block, name=heads[0]),))
    if folder.shapes()[heads[0]] != list(block.shape) or not torch.equal(read_box(folder, embedding, box), read_box(folder, tied, box)):
        raise HubError(f"{heads[0]} and {block.name} differ and config.json ties them; set tie_word_embeddings to false there")


def _place(p: P, local: Tensor, mesh: Mesh) -> Any:
    local = local.to(mesh.device)
    return local if p.kind == "buffer" else sharding.from_local(p, local, mesh)


def read_box(folder: Source, entry: Entry, box: Box) -> Tensor:
    """Part of one of our tensors in fp32; zeros where it has no foreign counterpart."""
    out = torch.zeros([length for _, length in box], dtype=torch.float32)
    for block in entry.blocks:
        for target, part in _overlaps(folder, block, box):
            out[target] = part
    return out


def _overlaps(folder: Source, block: Block, box: Box) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Where in the box a foreign tensor lies, and that part of it; nothing if it lies outside."""
    starts = [max(a, b) for (a, _), b in zip(box, block.start, strict=True)]
    ends = [min(a + n, b + m) for (a, n), b, m in zip(box, block.start, block.size, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return
    target = tuple(slice(start - a, end - a) for (a, _), start, end in zip(box, starts, ends, strict=True))
    inner = [slice(start - b, end - b) for start, end, b in zip(starts, ends, block.start, strict=True)]
    shape = [s.stop - s.start for s in inner]
    if block.permutation is None:
        part = folder.read(block.name, [slice(0, 1) if d is None else inner[d] for d in block.dims])
    else:
        rows = block.permutation[inner[0]]
        first, last = int(rows.min()), int(rows.max()) + 1  # a head at a time: what is between belongs to the same heads
        part = folder.read(block.name, [slice(first, last), *inner[1:]])[rows - first]
    yield target, part.reshape(shape).float()
