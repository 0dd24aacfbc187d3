"""What the command line does with checkpoints, one tensor in memory at a time."""

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch import Tensor

from configs.schema import DataConfig, ModelConfig
from data.errors import DataError
from data.tokenizer import load_tokenizer
from model import lora, speech_lm
from model.hub import adapter
from model.hub.families import FAMILIES
from model.hub.family import Entry, Family, HubError, matched
from model.hub.files import opened
from model.hub.load import read_box, read_config
from model.hub.save import Fetch, save
from model.params import P, named_leaves
from parallel.mesh import start_processes
from training.checkpoint import CheckpointError, find, read_meta


def inspect(path: Path) -> dict[str, Any]:
    """Prints the family, our configuration and what is left out; raises HubError if it cannot be loaded."""
    family, cfg = read_config(path)
    with opened(path) as source:
        found, notes = matched(family, cfg, source.shapes())
        types = sorted({str(dtype).removeprefix("torch.") for dtype in source.dtypes().values()})
    print(f"{family.name} ({family.model_type})")
    print(OmegaConf.to_yaml(OmegaConf.create({"model": asdict(cfg)})).rstrip())
    for note in notes:
        print(note)
    return {"family": family.model_type, "parameters": sum(math.prod(e.p.shape) for e in found if e.p.kind == "param"),
            "tensors": sum(len(e.blocks) for e in found), "types": types, "left_out": notes}


def convert(path: Path, out: Path, like: Path | None, kind: str | None, dtype: torch.dtype | None, limit_bytes: int) -> dict[str, Any]:
    """Writes `out` from a run's newest checkpoint, one checkpoint, or a published folder (which it is then like)."""
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        family, cfg = read_config(path)
        if (other := _family_to_write(like or path, kind)).model_type != family.model_type:
            raise HubError(f"{path} is {family.model_type} and --like {like} is {other.model_type}; name a folder of the same family")
        with _reader(path) as (_, fetch):
            save(out, family, cfg, fetch, like=like or path, dtype=dtype, limit_bytes=limit_bytes)
    else:
        cfg = stored_config(checkpoint)
        if like is None and kind is None and cfg.pretrained is not None and Path(cfg.pretrained).exists():
            like = Path(cfg.pretrained)
        family = _family_to_write(like, kind)
        lost = sorted({path.partition(".")[0] for path, _ in named_leaves(speech_lm.model_spec(cfg)) if not path.startswith(family.part)})
        data = stored_data(checkpoint)
        told = {"audio_locator_tag": data.audio_token, "prompt_format": data.prompt_format}  # what NeMo's SALM asks its config.json
        more = {key: value for key, value in told.items() if like is None and key in family.alone}
        save(out, family, cfg, from_checkpoint(checkpoint, cfg), like=like, more=more, dtype=dtype, limit_bytes=limit_bytes)
        if lost:
            print(f"not written, since {family.model_type} has no place for it: {', '.join(lost)}; --family salm/... has one")
        if like is None:
            write_companions(data, out)
    return {"family": family.model_type, "out": str(out), "files": len(list(out.glob("*.safetensors"))) if out.is_dir() else 1}


def export_adapter(path: Path, out: Path, like: Path | None, kind: str | None) -> dict[str, Any]:
    """Writes the adapters of a run's newest checkpoint, or of one checkpoint, as a folder for peft."""
    checkpoint = newest_checkpoint(path) or path
    cfg = stored_config(checkpoint)
    like = Path(cfg.pretrained) if like is None and kind is None and cfg.pretrained is not None else like
    family, (read, sizes) = _family_to_write(like, kind), _checkpoint_reader(checkpoint)
    found = adapter.targets(family, cfg)
    names = [name.removeprefix("params.") for name in sizes if name.startswith("params.")]
    held = {name.removesuffix(f"{lora.SUFFIX}.a") for name in names if name.endswith(f"{lora.SUFFIX}.a")}
    left = sorted(held - {target.path for target in found})
    if left or not held:
        about = f"also adapts {left[0]}, which is no part of {family.name}" if left else "has no adapters"
        raise HubError(f"{checkpoint} {about}; python -m model.hub convert writes the whole model")
    parts = [target.adapter(part) for target in found for part in (("a", "b", "magnitude") if cfg.lora.dora else ("a", "b"))]
    tensors = {name: read(f"params.{name}") for name in parts + ([target.path for target in found] if cfg.lora.dora else [])}
    adapter.save_adapter(out, tensors, family, cfg, None if like is None else str(like))
    besides = trained_besides(cfg, sizes)
    if besides:
        named = ", ".join(f"{part} ({count:,} parameters)" for part, count in besides.items())
        print(f"trained too, and not in the adapter: {named}; {_way_out(path, family, besides)}")
    return {"family": family.model_type, "out": str(out), "projections": len(found), "trained_besides": besides}


def trained_besides(cfg: ModelConfig, sizes: Container[str]) -> dict[str, int]:
    """Number of trained parameters of each part of the model that are no adapter's: those that have moments in a checkpoint."""
    numbers: Counter[str] = Counter()
    for name, p in named_leaves(speech_lm.model_spec(cfg)):
        if f"first.{name}" in sizes:
            numbers[name.partition(".")[0]] += math.prod(p.shape)
    return dict(numbers)


def _way_out(path: Path, family: Family, parts: Iterable[str]) -> str:
    """The command that exports parts of the model, if there is one."""
    families = (family, FAMILIES.get(f"salm/{family.model_type}", family))
    fitting = next((f for f in families if all(f"{part}.".startswith(f.part) for part in parts)), None)
    if fitting is None:
        return f"no family has a place for them beside {family.name}"
    return f"python -m model.hub convert {path} OUT{'' if fitting is family else f' --family {fitting.model_type}'} writes the whole model"


def verify(path: Path, other: Path | None) -> dict[str, Any]:
    """Prints and counts the tensors that are not finite, and those that are other numbers in `other` (of any family with our layers)."""
    not_finite, different = [], []
    with _reader(path) as (found, fetch), _reader(other or path) as (_, fetch_other):
        for entry in found:
            tensor = fetch(entry.path, entry.p)
            tensors = [tensor] if other is None else [tensor, fetch_other(entry.path, entry.p)]
            if not all(t.isfinite().all() for t in tensors):
                not_finite.append(entry.path)
            if other is not None and not torch.equal(*tensors):
                different.append(entry.path)
    for line in (f"{name}: {p}" for name, paths in (("not finite", not_finite), ("different", different)) for p in paths):
        print(line)
    return {"tensors": len(found), "not_finite": len(not_finite), "different": len(different)}


@contextmanager
def _reader(path: Path) -> Iterator[tuple[list[Entry], Fetch]]:
    """The entries of a published checkpoint, and what reads whole tensors of it by our paths."""
    family, cfg = read_config(path)
    with opened(path) as source:
        entries, _ = matched(family, cfg, source.shapes())
        found = {entry.path: entry for entry in entries}

        def fetch(name: str, p: P) -> Tensor:
            if name not in found or found[name].p.shape != p.shape:
                raise HubError(f"{path} has no {name} of shape {list(p.shape)}; it is another model")
            return read_box(source, found[name], [(0, n) for n in p.shape])

        yield entries, fetch


def newest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint of a run, or the path itself if it is one; None if it is of no run."""
    checkpoint = find(path)
    if checkpoint is None and (path / "checkpoints").is_dir() and not (path / "config.json").exists():
        _stored(path)  # says what the run lacks
    return checkpoint


def _stored(checkpoint: Path) -> dict[str, Any]:
    """The configuration of a checkpoint's run."""
    try:
        content: dict[str, Any] = read_meta(checkpoint)["config"]
    except CheckpointError as error:
        raise HubError(str(error)) from error
    return content


def stored_config(checkpoint: Path) -> ModelConfig:
    """The model that a checkpoint holds."""
    content = _stored(checkpoint)["model"]
    found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), content))
    return found


def stored_data(checkpoint: Path) -> DataConfig:
    """What the run of a checkpoint read."""
    content = _stored(checkpoint)["data"]
    found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), content))
    return found


def write_companions(data: DataConfig, out: Path) -> None:
    """The run's tokenizer, and a generation config with its end tokens; nothing where the run's tokenizer is gone."""
    try:
        tokenizer = load_tokenizer(data)
    except DataError as error:
        print(f"no tokenizer and no generation config written: {error}")
        return
    tokenizer.backend.save(str(out / "tokenizer.json"))
    ends = list(tokenizer.stop_ids)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.backend.id_to_token(ends[0])}
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends if len(ends) > 1 else ends[0]}, indent=2) + "\n")


def _family_to_write(like: Path | None, kind: str | None) -> Family:
    if like is not None:
        family = read_config(like)[0]
        if kind not in (None, family.model_type):
            raise HubError(f"--family {kind} contradicts {like}, which is {family.model_type}; leave --family out, or take another folder")
        return family
    if kind not in FAMILIES:
        raise HubError(f"a run can be written as any of {', '.join(FAMILIES)}: name one with --family, or a published folder with --like")
    return FAMILIES[kind]


def from_checkpoint(checkpoint: Path, cfg: ModelConfig) -> Fetch:
    """Reads whole tensors of a run's checkpoint, adapters added to their matrices."""
    read, sizes = _checkpoint_reader(checkpoint)
    names = {name.removeprefix("params.") for name in sizes if name.startswith("params.")}

    def fetch(path: str, p: P) -> Tensor:
        if p.kind == "buffer":
            return read(f"buffers.{path}")
        return lora.merge(path, lambda name: read(f"params.{name}"), names, cfg.lora)

    return fetch


def _checkpoint_reader(checkpoint: Path) -> tuple[Callable[[str], Tensor], dict[str, Any]]:
    """Reads whole tensors by the names of a checkpoint, and the sizes of all."""
    start_processes(torch.device("cpu"))
    sizes = {name: getattr(m, "size", None) for name, m in dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()}

    def read(name: str) -> Tensor:
        size = sizes.get(name)
        if size is None:
            raise HubError(f"{checkpoint} holds no {name}; it is of another model")
        tensors = {name: torch.zeros(size)}
        dcp.load(tensors, checkpoint_id=checkpoint)
        return tensors[name]

    return read, sizes
