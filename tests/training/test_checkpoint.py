"""What a folder holds after saving, after a crash in the middle, on a full disk."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema import ParallelConfig
from model.params import P
from parallel import sharding
from parallel.mesh import Mesh, make_mesh, start_processes
from training import checkpoint
from training.state import State


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    start_processes(torch.device("cpu"))
    return make_mesh(ParallelConfig(), torch.device("cpu"))


def state(step: int, mesh: Mesh, value: float = 1.0) -> State:
    p = P((2, 3), ("ffn", "embed"))
    weight = {"w": sharding.shard(p, torch.full((2, 3), value), mesh)}
    return State(step, weight, {"b": torch.full((2,), value)}, {"w": torch.zeros_like(weight["w"])}, {"w": torch.ones_like(weight["w"])})


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def save(run_dir: Path, step: int, mesh: Mesh, keep: int = 2, value: float = 1.0) -> Path:
    return checkpoint.save(run_dir, state(step, mesh, value), {"position": step}, mesh, keep, {})


def test_round_trip(tmp_path: Path, mesh: Mesh) -> None:
    path = save(tmp_path, 5, mesh, value=3.25)
    loaded, meta = checkpoint.load(path, state(0, mesh, 0.0), mesh)
    assert loaded.step == 5
    assert meta["data"] == checkpoint.data_states(meta) == [{"position": 5}]
    assert meta["libraries"] == dict.fromkeys(("nt", "nn", "tn"), "mkl")
    assert torch.equal(loaded.params["w"].full_tensor(), torch.full((2, 3), 3.25))
    assert torch.equal(loaded.buffers["b"], torch.full((2,), 3.25))
    assert torch.equal(loaded.second["w"].full_tensor(), torch.ones(2, 3))


def test_what_is_stored_is_read_in_other_dtypes(tmp_path: Path, mesh: Mesh) -> None:
    value = 1 + 2.0**-12  # bf16 has 1
    path, new = save(tmp_path, 5, mesh, value=value), state(0, mesh, 0.0)
    params, second = ({"w": tensors["w"].bfloat16()} for tensors in (new.params, new.second))
    narrow, _ = checkpoint.load(path, replace(new, params=params, second=second), mesh)
    assert torch.equal(narrow.params["w"].full_tensor(), torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(narrow.second["w"].full_tensor(), torch.ones(2, 3, dtype=torch.bfloat16))
    again, _ = checkpoint.load(checkpoint.save(tmp_path, replace(narrow, step=6), {}, mesh, 2, {}), state(0, mesh, 0.0), mesh)
    assert torch.equal(again.params["w"].full_tensor(), torch.ones(2, 3))
    assert torch.equal(again.buffers["b"], torch.full((2,), value))


def test_what_earlier_ranks_left_is_stored_once(tmp_path: Path, mesh: Mesh) -> None:
    position = {"position": 5, "before": [[{"rank": 0}]]}
    _, meta = checkpoint.load(checkpoint.save(tmp_path, state(5, mesh), position, mesh, 2, {}), state(0, mesh), mesh)
    assert meta["data"] == [{"position": 5}]
    assert checkpoint.data_states(meta) == [position]


def test_what_is_trained_must_be_what_was_trained(tmp_path: Path, mesh: Mesh) -> None:
    old = state(5, mesh)
    path = checkpoint.save(tmp_path, State(5, old.params, old.buffers, {}, {}), {}, mesh, 2, {})  # all frozen
    with pytest.raises(checkpoint.CheckpointError, match="lacks 2 tensors of this run, such as first.w: .* another choice"):
        checkpoint.load(path, state(0, mesh), mesh)
    frozen, _ = checkpoint.load(save(tmp_path, 6, mesh, value=3.25), State(0, state(0, mesh).params, old.buffers, {}, {}), mesh)
    assert (frozen.step, frozen.first) == (6, {})
    assert torch.equal(frozen.params["w"].full_tensor(), torch.full((2, 3), 3.25))


def test_the_newest_and_the_best_are_kept(tmp_path: Path, mesh: Mesh) -> None:
    for step in (1, 2, 3, 4):
        path = save(tmp_path, step, mesh)
        if step == 2:
            checkpoint.mark_best(tmp_path, path, 0.5, mesh)
    assert names(tmp_path) == ["best.json", "step_00000002", "step_00000003", "step_00000004"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step_00000004"
    assert checkpoint.best(tmp_path) == (tmp_path / "checkpoints" / "step_00000002", 0.5)


def test_one_kept_is_never_none(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep=1: the old one goes only when the new one is complete."""
    save(tmp_path, 1, mesh, keep=1)
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, 2, mesh, keep=1)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step_00000001"
    monkeypatch.undo()
    save(tmp_path, 2, mesh, keep=1)
    assert names(tmp_path) == ["step_00000002"]


def test_a_step_written_twice_is_there_once(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, mesh, value=1.0)
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, 1, mesh, value=2.0)
    monkeypatch.undo()
    loaded, _ = checkpoint.load(tmp_path / "checkpoints" / "step_00000001", state(0, mesh, 0.0), mesh)
    assert loaded.buffers["b"].tolist() == [1.0, 1.0]
    save(tmp_path, 1, mesh, value=2.0)
    assert names(tmp_path) == ["step_00000001"]
    loaded, _ = checkpoint.load(tmp_path / "checkpoints" / "step_00000001", state(0, mesh, 0.0), mesh)
    assert loaded.buffers["b"].tolist() == [2.0, 2.0]


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, mesh)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(checkpoint.CheckpointError, match=r"needs .* GiB and .* has .* GiB free; the older checkpoints are untouched"):
        save(tmp_path, 2, mesh)
    assert names(tmp_path) == ["step_00000001"]


def test_a_run_dir_that_is_a_file(tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="run"):
        save(tmp_path / "run", 1, mesh)


@pytest.mark.parametrize(("content", "words"), [
    (None, "no complete checkpoint: it lacks meta.json, which is written last"), ("{", "a damaged meta.json"), ("", "a damaged meta.json")])
def test_an_incomplete_checkpoint_is_refused(tmp_path: Path, mesh: Mesh, content: str | None, words: str) -> None:
    path = tmp_path / "checkpoints" / "step_00000009"
    path.mkdir(parents=True)
    if content is not None:
        (path / "meta.json").write_text(content)
    with pytest.raises(checkpoint.CheckpointError, match=f"step_00000009 holds {words}.*; give a run's folder or one of its"):
        checkpoint.load(path, state(0, mesh), mesh)
    if content is None:
        assert checkpoint.newest(tmp_path) is None
