"""Under torchrun: every rank loads its shards of folders, gathers them again and exports: `shards_worker EP TP FOLDER EP TP FOLDER...`.

The last line of rank 0 says of each which tensors differ from those that it reads alone, and whether the export has the folder's bytes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import ParallelConfig
from model.hub.family import choose_variant
from model.hub.files import Folder
from model.hub.load import load, read_box
from model.hub.save import save
from model.params import P
from parallel.mesh import Mesh, make_mesh, start_processes
from tests.dist.launch import leave


def main() -> None:
    start_processes(torch.device("cpu"))
    results = [check(Path(folder), make_mesh(ParallelConfig(ep=int(ep), tp=int(tp)), torch.device("cpu")))
               for ep, tp, folder in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True)]
    leave(results)


def check(folder: Path, mesh: Mesh) -> dict[str, Any]:
    loaded = load(folder, mesh)

    def fetch(path: str, p: P) -> Tensor:
        t = loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    with Folder(folder) as stored:
        found = choose_variant(loaded.family, loaded.cfg, stored.shapes())
        different = [e.path for e in found if not torch.equal(fetch(e.path, e.p), read_box(stored, e, [(0, n) for n in e.p.shape]))]
    save(folder / "again", loaded.family, loaded.cfg, fetch, like=folder, writes=mesh.rank == 0)
    numbers = sum(t.numel() if e.p.kind == "buffer" else t.to_local().numel() for e in found for t in [loaded.tensors[e.path]])
    same = mesh.rank > 0 or (folder / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    return {"different": different, "same_export": same, "numbers": numbers}


if __name__ == "__main__":
    main()
