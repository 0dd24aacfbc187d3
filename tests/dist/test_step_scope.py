"""compile.scope=step: forward and backward of the whole step one graph each, its gathers inside, on two processes with experts split."""

from pathlib import Path

import pytest
import torch

from tests.dist.first import gradient_error
from tests.dist.launch import torchrun

SMALL = ("model.encoder.n_layers=1", "model.decoder.pattern=M*E-")


def test_one_graph_equals_one_eager_process(tmp_path: Path) -> None:
    eager, graph = tmp_path / "eager", tmp_path / "graph"
    expected = torchrun(1, "tests.dist.first_worker", str(eager), "digits", "2", "-", "compile.enabled=false", *SMALL)
    got = torchrun(2, "tests.dist.first_worker", str(graph), "digits_ep2", "1", str(eager), "compile.scope=step", *SMALL)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    saved, reference = torch.load(graph), torch.load(eager)
    assert all(torch.equal(saved["start"][name], start) for name, start in reference["start"].items())
    for when in ("first", "last"):
        assert gradient_error(saved[when], reference[when]) < 1e-4
