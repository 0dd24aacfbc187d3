"""Under torchrun: save a state whose parameters leave some ranks without a part, or load it and say how it differs.

usage: checkpoint_worker save|load RUN_DIR STAGES
Each stage of the pipeline has some of the parameters, and all have one.
"""

import json
import sys
from itertools import chain
from pathlib import Path

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


def main() -> None:
    mode, run_dir, stages = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start_processes(torch.device("cpu"))
    ranks = dist.get_world_size() // stages
    mesh = make_mesh(ParallelConfig(pp=stages, ep=2 if ranks % 2 == 0 else 1, tp=ranks if ranks % 2 == 0 else 1), torch.device("cpu"))
    saved, result = state(0, 7, mesh), {}
    if mode == "save":
        checkpoint.save(run_dir, saved, {"position": mesh.rank}, mesh, 2, CONFIG)
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
