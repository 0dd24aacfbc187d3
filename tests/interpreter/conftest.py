"""Kernels on a CPU, in Triton's interpreter made strict; tests/kernels/interpreted.py starts a process for each file."""

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs TRITON_INTERPRET=1 in the environment before Python starts")

from perf.interpreter import make_strict

make_strict()


@pytest.fixture(autouse=True, scope="session")
def fill_every_new_tensor() -> Iterator[None]:
    """What PyTorch's own operators allocate too: NaN, and the largest of integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
