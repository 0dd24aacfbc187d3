"""A checkpoint of 4 processes in two stages, some without a part of a parameter, read by 4, 2, 3 and 1 in other stages."""

from pathlib import Path

import pytest

from tests.dist.checkpoint_worker import CONFIG
from tests.dist.launch import torchrun


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saved = torchrun(4, "tests.dist.checkpoint_worker", "save", str(folder), "2")
    assert saved["refused"] == [True, False]  # with a byte too little; what a stage's ranks share counts once
    return folder


@pytest.mark.parametrize(("processes", "stages"), [(1, 1), (2, 2), (3, 3), (4, 1)])
def test_every_world_size_reads_the_same_numbers(run_dir: Path, processes: int, stages: int) -> None:
    result = torchrun(processes, "tests.dist.checkpoint_worker", "load", str(run_dir), str(stages))
    assert result["different"] == []
    assert result["step"] == 7
    assert result["meta"] == {"step": 7, "world": 4, "data": [{"position": r} for r in range(4)], "data_before": [],
                              "libraries": dict.fromkeys(("nt", "nn", "tn"), "mkl"), "config": CONFIG}
