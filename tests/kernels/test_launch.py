"""Tile sizes: the table's row for the architecture, else its default; candidates take their place while they are tried."""

import json
from pathlib import Path

import pytest
import torch

from kernels import launch

TABLE = {"kernel": {"wide": {"default": {"BLOCK": 1}, "sm_120": {"BLOCK": 2}}, "any": {"default": {"BLOCK": 3}}}}
CPU = torch.device("cpu")
TUNED = sorted(Path(launch.__file__).parent.glob("*/tuned.json"))


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(launch, "table", lambda operation: TABLE)


def test_choice_by_architecture_and_shape(table):
    assert launch.tiles("operation", "kernel", CPU) == {"BLOCK": 3}
    assert launch.tiles("operation", "kernel", CPU, "wide") == {"BLOCK": 1}
    with launch.assumed(120):
        assert launch.tiles("operation", "kernel", CPU, "wide") == {"BLOCK": 2}
        assert launch.tiles("operation", "kernel", CPU) == {"BLOCK": 3}
    assert launch.tiles("operation", "kernel", CPU, "wide") == {"BLOCK": 1}


def test_forced_and_asked(table):
    with launch.asked() as asked, launch.forced("kernel", {"BLOCK": 9}):
        assert launch.tiles("operation", "kernel", CPU, "wide") == {"BLOCK": 9}
    assert asked == {("kernel", "wide")}
    assert launch.tiles("operation", "kernel", CPU, "wide") == {"BLOCK": 1}
    assert asked == {("kernel", "wide")}


@pytest.mark.parametrize("capability, expected", [
    ((8, 0), 80), ((8, 6), 120), ((8, 9), 120), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((12, 0), 120), ((12, 1), 120)])
def test_architecture_of_a_device(monkeypatch, capability, expected):
    """Consumer cards of compute capability 8.6 and 8.9 have as little shared memory as those of 12.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.architecture(torch.device("cuda")) == expected


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.parent.name)
def test_tables(path):
    """Every shape class has a default, every row sets the number of warps, and rows are for architectures that are told apart."""
    known = {"default", *(f"sm_{arch}" for arch in launch.ARCHITECTURES)}
    for kernel, shapes in json.loads(path.read_text()).items():
        for shape, choices in shapes.items():
            assert "default" in choices, (kernel, shape)
            assert set(choices) <= known, (kernel, shape)
            assert all("num_warps" in choice for choice in choices.values()), (kernel, shape)
