"""Runs every file of tests/interpreter in a process of its own: Triton reads TRITON_INTERPRET once, when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path.relative_to(ROOT))]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
