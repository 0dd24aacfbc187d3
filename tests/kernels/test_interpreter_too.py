"""The files of tests/interpreter that test_interpreter.py leaves."""

from pathlib import Path

import pytest

from tests.kernels.interpreted import FILES, assert_passes

pytest.importorskip("triton")


@pytest.mark.parametrize("path", FILES[1::2], ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    assert_passes(path)
