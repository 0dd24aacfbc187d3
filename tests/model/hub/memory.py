"""Memory of two processes that load a folder of 3 GB, each its half: `python -m tests.model.hub.memory`; the last line is a JSON object.

Under torchrun with FOLDER: the peak of anonymous resident memory while loading, above the level before, against the bytes of the shard.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import DecoderConfig, ModelConfig, ParallelConfig
from model import params
from model.hub.families import FAMILIES
from model.hub.load import load
from model.hub.save import save
from parallel.mesh import make_mesh, start_processes
from tests.dist.launch import leave, torchrun

LLAMA = ModelConfig(encoder=None, decoder=DecoderConfig(
    pattern="*-" * 16, d_model=2048, vocab_size=32000, n_heads=16, n_kv_heads=4, head_dim=128, rope_theta=1e4, mlp_ffn=5632,
    activation="swiglu"))
ALLOWED = 1.15, 200_000_000  # times the shard, and bytes


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest RssAnon inside the block, looked at every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.before = self.highest = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.003):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *exc: object) -> None:
        self.done.set()
        self.thread.join()

    @property
    def above(self) -> int:
        return self.highest - self.before


def worker(folder: Path) -> None:
    start_processes(torch.device("cpu"))
    mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
    with Peak() as peak:
        loaded = load(folder, mesh)
    shard = sum(t.to_local().nbytes for t in loaded.tensors.values())
    found: list[Any] = [None] * mesh.world
    dist.all_gather_object(found, (peak.above, shard))
    over = [above - (ALLOWED[0] * own + ALLOWED[1]) for above, own in found]
    leave({"peak_mb": [round(above / 1e6) for above, _ in found], "shard_mb": [round(own / 1e6) for _, own in found],
           "within": max(over) <= 0})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(0)

        def fetch(path: str, p: params.P) -> torch.Tensor:
            return torch.empty(p.shape).uniform_(-1, 1, generator=generator)

        save(Path(folder), FAMILIES["llama"], LLAMA, fetch, dtype=torch.float32, limit_bytes=1_000_000_000)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(json.dumps({"checkpoint_mb": round(size / 1e6), **torchrun(2, "tests.model.hub.memory", folder)}))


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
