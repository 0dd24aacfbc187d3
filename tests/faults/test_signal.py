"""SIGTERM: a checkpoint of the step that was reached, exit status 0, and no process left."""

import os
import signal
from pathlib import Path

from tests.faults.resume import start


def test_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    small = ["compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*E-"]
    process = start(tmp_path / "run", ["train.steps=5000", *small])
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate(timeout=300)[0]
    assert process.returncode == 0, "".join(seen) + rest
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    step = int(checkpoint.name.removeprefix("step_"))
    assert 3 <= step <= 6
    assert f"interrupted at step {step}; the same command continues" in rest
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return
    raise AssertionError("processes of the run are left")
