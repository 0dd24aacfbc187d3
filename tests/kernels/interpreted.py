"""Runs files of tests/interpreter in processes of their own: Triton reads TRITON_INTERPRET once, when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "interpreter").glob("test_*.py"))


def assert_passes(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path.relative_to(ROOT))]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
