"""Under torchrun with 4 processes, of which those of two stages share their rows: what each rank got, how often each read, and what ended
the reading."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import ParallelConfig
from data.errors import DataError, UtteranceError
from parallel.collectives import gather_objects
from parallel.mesh import make_mesh, start_processes
from tests.dist.launch import leave
from training.rows import read_once

BATCHES = 3


def batch(number: int) -> dict[str, Any]:
    """Tensors of several widths, odd lengths and no length, and what stays on the host."""
    return {"segments_T": torch.arange(3 + number, dtype=torch.int32), "audio_S": torch.linspace(-1, 1, 5 + number),
            "labels_UL": torch.full((2, number), number), "wide_S": torch.full((3,), 1 / 3, dtype=torch.float64),
            "here_T": torch.tensor([True, False, True]), "frames_A": torch.from_numpy(np.zeros(0, np.int64)),
            "ids": [f"a{number}"], "state": {"index": number}, "fill": 0.5}


def main() -> None:
    start_processes(torch.device("cpu"))
    mesh, reads = make_mesh(ParallelConfig(pp=2), torch.device("cpu")), []
    own = range(mesh.rank % 2, mesh.rank % 2 + BATCHES)  # stages are outermost, so that ranks r and r + 2 have row r

    def counted(end: Callable[[], None], first: int, ranks: int) -> Iterator[dict[str, Any]]:
        assert ranks == 2
        for number in range(first, first + BATCHES):
            reads.append(number)
            yield batch(number)
        end()

    def fail(error: Exception) -> Callable[..., Any]:
        def end(*place: int) -> None:
            raise error
        return end

    got: dict[str, Any] = {"equal": [], "ends": []}
    for made, expected in zip(read_once(functools.partial(counted, lambda: None), mesh), map(batch, own), strict=True):
        same = [torch.equal(made[name], value) and made[name].dtype == value.dtype if isinstance(value, torch.Tensor)
                else made[name] == value for name, value in expected.items()]
        got["equal"].append(all(same) and made.keys() == expected.keys())
    for open_rows in (functools.partial(counted, fail(DataError("a.wav is empty; repair it"))),
                      fail(DataError("two utterances for three processes")),
                      functools.partial(counted, fail(UtteranceError("too_long", "b.wav is too long"))),
                      functools.partial(counted, fail(KeyError("x")))):
        before = len(reads)
        try:
            for _ in read_once(open_rows, mesh):
                pass
        except Exception as error:
            got["ends"].append([type(error).__name__, str(error), len(reads) - before])
    leave(gather_objects(got | {"reads": len(reads)}))


if __name__ == "__main__":
    main()
