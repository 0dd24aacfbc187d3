"""Writes a model as a Hugging Face folder, tensor by tensor, from shards on any number of ranks or from a checkpoint on disk; an encoder
like that of a .nemo file as such a file."""

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import ModelConfig
from model import speech_lm
from model.hub.archive import Archive
from model.hub.family import Entry, Family, HubError, choose_variant, layouts
from model.hub.files import LLM_CONFIG, Writer, opened, read_content
from model.hub.rows import Block
from model.params import P, named_leaves

LIMIT_BYTES = 5_000_000_000  # of one file
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
              "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "preprocessor_config.json", "processor_config.json")
FORMULAS = {  # letters of layers, and what decides how they compute beside their shapes
    "M*WE-": ("pattern", "norm_eps", "post_norm"), "*W": ("rope_theta", "rope_fraction", "rope_scaling"), "W": ("window",),
    "E-": ("activation",), "E": ("top_k", "router", "n_group", "topk_group", "norm_topk", "routed_scaling")}
Fetch = Callable[[str, P], Tensor]  # the whole tensor of one of our paths


def save(out: Path, family: Family, cfg: ModelConfig, fetch: Fetch, *, like: Path | None = None, more: Mapping[str, Any] | None = None,
         dtype: torch.dtype | None = None, limit_bytes: int = LIMIT_BYTES, writes: bool = True) -> None:
    """config.json, safetensors with an index where there are several, generation config and tokenizer files.

    :param fetch: called for every tensor in the same order on all ranks, so that it may gather
    :param like: a folder of the same family: its config.json is kept but for what has changed, each tensor gets the name and the type that
        it has there, and its tokenizer and generation config are copied
    :param more: keys of config.json that no formula of ours knows, like those of special tokens
    :param dtype: type of the tensors, but for buffers and what `like` keeps wider than most, like A_log; None: that in `like`, else bf16
    :param limit_bytes: of one file, where the family's owner opens several
    :param writes: whether this rank writes; the others only take part in `fetch`
    """
    found, stored = _layout(family, cfg, like)
    content = _config(family, cfg, like, dtype)
    _check_told(family, cfg, content)
    types = _types(found, stored, dtype)
    plan = {block.name: (types[block.name], block.shape) for entry in found for block in entry.blocks}
    writer: Writer | Archive | None = None
    if writes and like is not None and like.suffix == ".nemo":
        if out.suffix != ".nemo" or content != read_content(like):
            raise HubError(f"{out} is to be a .nemo file with an encoder like that of {like}; give it a name that ends in .nemo, and the "
                           "file that the encoder is from")
        if dtype is not None:
            raise HubError(f"{out} keeps the types of {like}; leave --dtype out")
        writer = Archive(out, like)
    elif writes:
        out.mkdir(parents=True, exist_ok=True)
        _write_config(out, content | dict(more or {}))
        _copy(like, out)
        writer = Writer(out, plan, sys.maxsize if family.one_file else limit_bytes)
    for entry in found:
        full = fetch(entry.path, entry.p)
        if writer is not None:
            _check_finite(entry, full)
            for block in entry.blocks:
                part = foreign(full, block).to(types[block.name])
                _check_range(entry, part)
                writer.write(block.name, part)
    if writer is not None:
        writer.close()


def foreign(full: Tensor, block: Block) -> Tensor:
    """The foreign tensor that is a box of ours."""
    box = full[tuple(slice(start, start + length) for start, length in zip(block.start, block.size, strict=True))]
    if block.permutation is not None:
        box = torch.empty_like(box).index_copy_(0, block.permutation.to(box.device), box)
    return box.reshape(block.shape)


def _check_finite(entry: Entry, full: Tensor) -> None:
    if not full.isfinite().all():
        raise HubError(f"{entry.path} has values that are not finite; export an earlier checkpoint")


def _check_range(entry: Entry, part: Tensor) -> None:
    if not part.isfinite().all():
        raise HubError(f"{entry.path} has numbers beyond those of {_name(part.dtype)}; choose another type with --dtype")


def _check_told(family: Family, cfg: ModelConfig, content: Mapping[str, Any]) -> None:
    """That config.json describes the model: else its owner leaves out tensors, or computes otherwise, without a word."""
    told = family.read(content)
    told.decoder.vocab_multiple = cfg.decoder.vocab_multiple  # which no file knows
    shapes, wanted = ({path: p.shape for path, p in named_leaves(speech_lm.model_spec(model)) if path.startswith(family.part)}
                      for model in (told, cfg))
    wrong = sorted(path for path in shapes.keys() | wanted.keys() if shapes.get(path) != wanted.get(path))
    if "decoder." in family.part:
        wrong += [f"model.decoder.{key}={getattr(cfg.decoder, key)}" for letters, keys in FORMULAS.items() for key in keys
                  if set(letters) & set(cfg.decoder.pattern) and getattr(told.decoder, key) != getattr(cfg.decoder, key)]
    if wrong:
        raise HubError(f"{family.name} cannot hold this model: its config.json has no words for {', '.join(wrong[:5])}"
                       f"{' and others' if len(wrong) > 5 else ''}; name another with --family or --like")


def _layout(family: Family, cfg: ModelConfig, like: Path | None) -> tuple[list[Entry], Mapping[str, torch.dtype]]:
    """The entries to write, and the types of tensors that are known."""
    if like is None:
        return layouts(family, cfg)[0], {}
    with opened(like) as folder:
        return choose_variant(family, cfg, folder.shapes()), folder.dtypes()


def _types(found: Sequence[Entry], stored: Mapping[str, torch.dtype], asked: torch.dtype | None) -> dict[str, torch.dtype]:
    """The type in which each foreign tensor is written."""
    chosen = {b.name: torch.float32 if e.p.kind == "buffer" else asked or torch.bfloat16 for e in found for b in e.blocks}
    known = {name: stored[name] for name in chosen if name in stored}
    if asked is None:
        return chosen | known
    numbers: Counter[torch.dtype] = Counter()
    for block in (b for entry in found for b in entry.blocks if b.name in known):
        numbers[known[block.name]] += math.prod(block.shape)
    usual = max(numbers, key=lambda dtype: numbers[dtype], default=asked).itemsize
    return chosen | {name: dtype for name, dtype in known.items() if dtype.itemsize > max(usual, chosen[name].itemsize)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _retyped(content: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json with another type wherever it names the one of its tensors."""
    return {key: _retyped(value, dtype) if isinstance(value, dict) else _name(dtype) if key in ("torch_dtype", "dtype") and value else value
            for key, value in content.items()}


def _config(family: Family, cfg: ModelConfig, like: Path | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """The family's keys over those of `like`."""
    if like is None:  # a family's default padding token may lie outside this vocabulary
        return {"architectures": [family.architecture], "torch_dtype": _name(dtype or torch.bfloat16), "pad_token_id": None,
                **family.alone, **family.write(cfg)}
    base = read_content(like) if dtype is None else _retyped(read_content(like), dtype)
    base |= {key: value for key, value in family.without.items() if key in base}
    written = family.write(cfg)
    if family.write(family.read(base)) == written:
        return base
    merged = _over(base, written)
    if family.write(family.read(merged)) != written:
        raise HubError(f"config.json of {like} says in other keys what this model changes; export it without, as --family "
                       f"{family.model_type}")
    return merged


def _over(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `base`, section by section."""
    sections = {key: _over(base[key], value) for key, value in new.items() if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return {**base, **new, **sections}


def _write_config(out: Path, content: dict[str, Any]) -> None:
    """config.json; of a SALM the language model's beside it."""
    llm = content.pop("llm", None)
    for name, part in (("config.json", content), (LLM_CONFIG, llm)):
        if part is not None:
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(json.dumps(part, indent=2) + "\n")


def _copy(like: Path | None, out: Path) -> None:
    """The companions, and the owner's own classes, which config.json may name as auto_map."""
    if like is None:
        return
    for path in (*(like / name for name in COMPANIONS), *like.glob("*.py")):
        if path.exists():
            shutil.copyfile(path, out / path.name)
