"""Checkpoints with torch.distributed.checkpoint: written under a temporary name, renamed when complete, oldest removed last.

RUN_DIR/checkpoints/step_00000020/ holds the sharded tensors and meta.json: step, processes, each rank's data position, which library
multiplies on a CPU, configuration. The stages of a pipeline write and read their own tensors.
No generator state is saved because none exists: every random draw is a pure function of (seed, step or data position).
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, zeros

from kernels.linear import libraries
from parallel.collectives import from_first_rank, gather_objects
from parallel.mesh import Mesh
from parallel.sharding import chunk_bounds
from training.state import State

FREE_SPACE_FACTOR = 1.05  # of the estimated size, that must be free before writing


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says which, why and what to do."""


def save(run_dir: Path, state: State, data_state: Any, mesh: Mesh, keep: int, config: dict[str, Any]) -> Path:
    """Write a complete checkpoint of `state` and every rank's `data_state`, then drop all but the newest `keep` and the best one."""
    final = run_dir / "checkpoints" / f"step_{state.step:08d}"
    temporary = final.with_suffix(".incomplete")
    before = (data_state or {}).get("before", [])  # long, and the same on every rank
    positions = gather_objects({key: value for key, value in (data_state or {}).items() if key != "before"})
    needed = sum(gather_objects(sum(t.numel() * t.element_size() for t in _tensors(state).values()), mesh.pp_group))
    _on_first_rank(mesh, lambda: _prepare(temporary, needed))
    dcp.save(_tensors(state), checkpoint_id=temporary)
    meta = {"step": state.step, "world": mesh.world, "data": positions, "data_before": before, "libraries": libraries(), "config": config}
    _on_first_rank(mesh, lambda: _complete(temporary, final, meta, keep))
    return final


def load(path: Path, state: State, mesh: Mesh, tables: Mapping[str, int] = MappingProxyType({})) -> tuple[State, dict[str, Any]]:
    """`state` with the checkpoint's values (read in place, each rank its own shards), and meta.json. Any number of processes.

    :param tables: names of parameters whose rows are padded, perhaps otherwise than in the checkpoint, and their number without padding
    """
    meta, tensors = read_meta(path), _tensors(state)
    stored: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    missing = sorted(set(tensors) - set(stored))
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of this run, such as {missing[0]}: it was written with another model "
                              "or another choice of what is trained; resume with that run's configuration, or start a new run_dir")
    rows = {f"{group}.{name}": count for group in ("params", "first", "second") for name, count in tables.items()}
    padded = {name: _whole_rows(t, stored[name].size) for name, t in tensors.items()
              if name in rows and _differs_in_padding(t.shape, stored[name].size, rows[name], meta)}
    dcp.load(tensors | padded, checkpoint_id=path)
    for name, whole in padded.items():
        _copy_rows(tensors[name], whole, rows[name])
    buffers = {name: tensors[f"buffers.{name}"] for name in state.buffers}
    state.refresh()
    return replace(state, step=meta["step"], buffers=buffers), meta


def _differs_in_padding(shape: Sequence[int], stored: Sequence[int], real: int, meta: dict[str, Any]) -> bool:
    return shape[0] != stored[0] >= real == meta["config"]["model"]["decoder"]["vocab_size"]


def _whole_rows(t: DTensor, size: Sequence[int]) -> DTensor:
    """Room for a table as it is stored, of which every rank has all rows."""
    placements = [Replicate() if p.is_shard(0) else p for p in t.placements]
    return zeros(*size, dtype=t.dtype, device_mesh=t.device_mesh, placements=placements)


def _copy_rows(t: DTensor, whole: DTensor, real: int) -> None:
    """The rank's rows of a table, those from `real` on zeros."""
    first, count = 0, t.shape[0]
    for i, placement in enumerate(t.placements):
        if placement.is_shard(0):
            first, count = chunk_bounds(count, t.device_mesh.size(i), t.device_mesh.get_local_rank(i))
    rows = whole.to_local()[min(first, real) : min(first + count, real)]
    t.to_local().zero_()[: len(rows)] = rows


def data_states(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The data position of every rank, out of meta.json; none if the run had read nothing."""
    before = {"before": meta["data_before"]} if meta["data_before"] else {}
    return [state | before for state in meta["data"] if state]


def find(path: Path) -> Path | None:
    """The checkpoint that a path is, or the newest one of the run that it is; None if it is neither."""
    return path if (path / "meta.json").exists() else newest(path)


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a complete checkpoint; raises CheckpointError that says what the path lacks to be one."""
    try:
        content: dict[str, Any] = json.loads((path / "meta.json").read_text())
        return content
    except json.JSONDecodeError as error:
        reason = f"holds a damaged meta.json ({error})"
    except OSError as error:
        reason = _lacking(path, error)
    raise CheckpointError(f"{path} {reason}; give a run's folder or one of its checkpoints/step_*")


def _lacking(path: Path, error: OSError) -> str:
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is a file, and a checkpoint is a folder"
    if (path / "meta.json").exists():
        return f"holds a meta.json that cannot be read ({error.strerror})"
    if path.name.startswith("step_"):
        return "holds no complete checkpoint: it lacks meta.json, which is written last"
    begun = sorted(folder.relative_to(path) for pattern in ("step_*", "checkpoints/step_*") for folder in path.glob(pattern))
    return f"holds no complete checkpoint: {f'of checkpoints it has {begun[-1]} alone' if begun else 'it lacks checkpoints/step_*'}"


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return max(_complete_ones(run_dir), default=None)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def mark_best(run_dir: Path, path: Path, value: float, mesh: Mesh) -> None:
    """Note a checkpoint as the best so far; it is then never dropped."""
    note = run_dir / "checkpoints" / "best.json"
    _on_first_rank(mesh, lambda: _write_json(note, {"checkpoint": path.name, "value": value}))


def best(run_dir: Path) -> tuple[Path, float] | None:
    """The best checkpoint and its validation value."""
    note = run_dir / "checkpoints" / "best.json"
    if not note.exists():
        return None
    content = json.loads(note.read_text())
    return note.with_name(content["checkpoint"]), content["value"]


def _tensors(state: State) -> dict[str, Any]:
    groups = {"params": state.params, "buffers": state.buffers, "first": state.first, "second": state.second}
    return {f"{group}.{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def _complete_ones(run_dir: Path) -> list[Path]:
    return [p for p in (run_dir / "checkpoints").glob("step_*") if (p / "meta.json").exists() and not p.suffix]


def _prepare(temporary: Path, needed: int) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    free = shutil.disk_usage(temporary).free
    if free < needed * FREE_SPACE_FACTOR:
        temporary.rmdir()
        raise CheckpointError(f"a checkpoint needs {needed / 2**30:.2f} GiB and {temporary.parent} has {free / 2**30:.2f} GiB free; the "
                              "older checkpoints are untouched: free some space, lower train.keep_checkpoints or choose another run_dir")


def _complete(temporary: Path, final: Path, meta: dict[str, Any], keep: int) -> None:
    _write_json(temporary / "meta.json", meta)
    replaced = final.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    kept = {p.name for p in sorted(_complete_ones(final.parent.parent))[-max(1, keep):]}
    marked = best(final.parent.parent)
    for path in _complete_ones(final.parent.parent):
        if path.name not in kept and (marked is None or path != marked[0]):
            shutil.rmtree(path)


def _write_json(path: Path, content: Any) -> None:
    """Replace the file in one move, so that a reader or a crash never meets half of it."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as f:
        json.dump(content, f)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def _on_first_rank(mesh: Mesh, action: Any) -> None:
    """Run `action` on rank 0; what it raises is raised on every rank, and nobody goes on before it is done."""
    outcome: str | None = None
    if mesh.rank == 0:
        try:
            action()
        except (OSError, CheckpointError) as error:
            outcome = str(error)
    outcome = from_first_rank(outcome)
    if outcome is not None:
        raise CheckpointError(outcome)
