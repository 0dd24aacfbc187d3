"""Runs a module under torchrun on this machine and returns what its rank 0 printed as the last line, one JSON object."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def torchrun(processes: int, module: str, *args: str, timeout_sec: int = 900, **env: str) -> Any:
    """The JSON object of `torchrun -m module args`; raises with the output when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", module, *args]
    # which of two libraries multiplies is otherwise measured by each run anew, and they round differently
    environment = os.environ | {"OMP_NUM_THREADS": "1", "REEDLING_FP32_PRODUCTS": "mkl", "PYTHONFAULTHANDLER": "1"} | env
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_sec)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def leave(result: Any = None) -> NoReturn:
    """Ends a worker when all have come here; the first rank prints its result. Nothing is taken apart: gloo's threads, of which a group has its own, have crashed on the way
    out of a process that had made many groups."""
    if dist.get_rank() == 0 and result is not None:
        print(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
