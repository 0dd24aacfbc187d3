"""Under torchrun: every rank loads its shards of a folder, gathers them again and exports: `shards_worker FOLDER EP`.

The last line of rank 0 says which tensors differ from those that it reads alone, and which bytes of the export from the folder's.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import ParallelConfig
from model.hub.family import choose_variant
from model.hub.files import Folder
from model.hub.load import load, read_box
from model.hub.save import save
from model.params import P
from parallel.mesh import make_mesh, start_processes


def main() -> None:
    folder, ep = Path(sys.argv[1]), int(sys.argv[2])
    start_processes(torch.device("cpu"))
    mesh = make_mesh(ParallelConfig(ep=ep), torch.device("cpu"))
    loaded = load(folder, mesh)

    def fetch(path: str, p: P) -> Tensor:
        t = loaded.tensors[path]
        return t if p.kind == "buffer" else t.full_tensor()

    different = []
    with Folder(folder) as stored:
        for entry in choose_variant(loaded.family, loaded.cfg, stored.shapes()):
            whole = read_box(stored, entry, [(0, n) for n in entry.p.shape])
            if not torch.equal(fetch(entry.path, entry.p), whole):
                different.append(entry.path)
    save(folder / f"again{dist.get_world_size()}", loaded.family, loaded.cfg, fetch, like=folder, writes=mesh.rank == 0)
    numbers = sum(t.numel() if entry.p.kind == "buffer" else t.to_local().numel()
                  for entry in choose_variant(loaded.family, loaded.cfg, {}) for t in [loaded.tensors[entry.path]])
    if mesh.rank == 0:
        same = (folder / f"again{dist.get_world_size()}" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        print(json.dumps({"different": different, "same_export": same, "numbers": numbers}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
