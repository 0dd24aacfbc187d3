"""The prediction of a small layout against two gloo processes."""

import pytest

from perf.plan_check import BARS, run


def test_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    errors, good = run(["cp 2, ring"])  # weights are gathered and gradients scattered as with dp 2
    assert set(errors) == set(BARS)
    assert errors["state_error"] == errors["bytes_error"] == 0.0
    assert good
