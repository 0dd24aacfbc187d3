"""20 steps at once against 10, a kill, and 10 more: `python -m tests.faults.resume [overrides]`; the last line is one JSON object."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parents[2]
# which of two libraries multiplies is otherwise measured anew by each process, and they round differently
ENVIRONMENT = os.environ | {"REEDLING_FP32_PRODUCTS": "mkl"}
ARGUMENTS = ["+experiment=digits", "train.steps=20", "train.checkpoint_every=10", "train.validate_every=0", "train.decode_at_start=false",
             "train.log_every=1", "train.decode_every=0", "generation.max_new_tokens=2",
             "data.validation_utterances=2", "data.curriculum_steps=10"]
TIMEOUT_SEC = 900


def start(run_dir: Path, overrides: list[str]) -> subprocess.Popen[str]:
    """train.py in its own process group."""
    command = [sys.executable, "train.py", *ARGUMENTS, f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)


def finish(process: subprocess.Popen[str]) -> None:
    output = process.communicate(timeout=TIMEOUT_SEC)[0]
    if process.returncode:
        raise RuntimeError(f"train.py ended with {process.returncode}:\n{output[-4000:]}")


def kill_after_checkpoint(process: subprocess.Popen[str], checkpoint: Path) -> None:
    """SIGKILL to the process and its data workers as soon as the checkpoint is complete."""
    limit = time.monotonic() + TIMEOUT_SEC
    while not (checkpoint / "meta.json").exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"no {checkpoint} came:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def tensors(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds."""
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    return torch.load(folder / "whole.pt")


def compare(overrides: list[str]) -> dict[str, Any]:
    """Both runs and their last checkpoints, bit for bit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(start(folder / "whole", overrides))
        broken = folder / "broken"
        kill_after_checkpoint(start(broken, overrides), broken / "checkpoints" / "step_00000010")
        for later in (broken / "checkpoints").glob("step_0000002*"):
            raise RuntimeError(f"{later} was there before the kill; make the steps slower")
        finish(start(broken, overrides))
        last = [folder / run / "checkpoints" / "step_00000020" for run in ("whole", "broken")]
        one, two = (tensors(checkpoint, folder) for checkpoint in last)
        positions = [json.loads((checkpoint / "meta.json").read_text())["data"] for checkpoint in last]
        logs = [[json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()] for run in ("whole", "broken")]
    losses = [{entry["step"]: entry["train/loss"] for entry in log if "train/loss" in entry} for log in logs]
    return {
        "bit_equal": one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one) and positions[0] == positions[1]
        and losses[0] == losses[1] and len(losses[0]) == 20,
        "tensors": len(one),
        "steps_compared": len(losses[0]),
    }


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1:])))
