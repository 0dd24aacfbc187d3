"""Under torchrun: save a state whose parameters leave some ranks without a part, or load it and say how it differs.

usage: checkpoint_worker save|load RUN_DIR STAGES
Each stage of the pipeline has some of the parameters, and all have one.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from configs.schema import ParallelConfig
from model import params
from model.params import P
from parallel import sharding
from parallel.collectives import gather_objects
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.launch import leave
from training import checkpoint
from training.state import State

VOCABULARY = 5
SPEC = {
    "one": P((1,), ("heads",)),
    "three": P((3, 2), ("embed", "ffn")),
    "five": P((2, 5), ("ffn", "embed")),
    "eight": P((8, 128), ("embed", "ffn")),
    "experts": P((4, 3, 7), ("experts", "ffn", "embed")),
    "mean": P((6,), ("embed",), kind="buffer"),
}

# bytes of a checkpoint of two stages with tp 2: one, five, eight, experts and a table of 8 rows; three, eight and the buffer
NEEDED = 4 * (3 * (1 + 10 + 1024 + 84 + 48) + 3 * (6 + 1024) + 6)
CONFIG = {"model": {"decoder": {"vocab_size": VOCABULARY}}}


def state(seed: int, step: int, mesh: Mesh) -> State:
    """This stage's parameters, moments and buffers, different numbers everywhere; a table with another padding for each tp."""
    spec = SPEC | {"table": P((4 * mesh.sizes.tp if mesh.sizes.tp > 1 else VOCABULARY, 6), ("vocab", "embed"), drawn=VOCABULARY)}
    own = {name: spec[name] for name in ("eight", *list(spec)[mesh.pp_rank :: mesh.sizes.pp])}
    groups = [params.split_kinds(own, sharding.init_sharded(own, seed + i, mesh)) for i in range(3)]
    return State(step, groups[0][0], groups[0][1], groups[1][0], groups[2][0])


def whole(s: State) -> dict[str, torch.Tensor]:
    sharded = {f"{group}.{n}": t.full_tensor() for group in ("params", "first", "second") for n, t in getattr(s, group).items()}
    return sharded | {f"buffers.{n}": t for n, t in s.buffers.items()}


def save_with_space(free: int, run_dir: Path, s: State, mesh: Mesh) -> str | None:
    """Saves on a disk with that many bytes free; why not, where that fails."""
    try:
        with mock.patch("shutil.disk_usage", lambda path: SimpleNamespace(free=free)):
            checkpoint.save(run_dir, s, {"position": mesh.rank}, mesh, 2, CONFIG)
    except checkpoint.CheckpointError as error:
        return str(error)
    return None


def main() -> None:
    mode, run_dir, stages = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start_processes(torch.device("cpu"))
    ranks = dist.get_world_size() // stages
    mesh = make_mesh(ParallelConfig(pp=stages, ep=2 if ranks % 2 == 0 else 1, tp=ranks if ranks % 2 == 0 else 1), torch.device("cpu"))
    saved = state(0, 7, mesh)
    result: dict[str, Any] = {}
    if mode == "save":
        ended = [save_with_space(free, run_dir, saved, mesh) for free in (int(1.05 * NEEDED) - 1, int(1.05 * NEEDED) + 1)]
        result = {"refused": [error is not None for error in ended]}
    else:
        path = checkpoint.newest(run_dir)
        assert path is not None
        loaded, meta = checkpoint.load(path, state(50, 0, mesh), mesh, {"table": VOCABULARY})
        expected = whole(saved)
        different = gather_objects([n for n, t in whole(loaded).items() if not torch.equal(t, expected[n])])
        result = {"step": loaded.step, "meta": meta, "different": list(chain.from_iterable(different))}
    leave(result)


if __name__ == "__main__":
    main()
