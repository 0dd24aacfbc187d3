"""Every other file of tests/interpreter; test_interpreter_too.py has the rest, so that two processes may share them."""

from pathlib import Path

import pytest

from tests.kernels.interpreted import FILES, assert_passes

pytest.importorskip("triton")


@pytest.mark.parametrize("path", FILES[0::2], ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    assert_passes(path)
