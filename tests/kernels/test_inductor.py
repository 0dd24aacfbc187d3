"""What the compiler is told."""

from pathlib import Path

import pytest
import torch

from kernels.inductor import name_cached_graphs


def test_cached_graphs_belong_to_one_version_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph made for an operator that returned fewer rows must not be found by the one that returns more."""
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    (tmp_path / "folder").mkdir()
    tags = []
    for name, content in (("a.py", "ROWS = 32"), ("a.py", "ROWS = 16"), ("a.py", "ROWS = 32"), ("a.cpp", "int a;"), ("a.h", "int a;")):
        (tmp_path / "folder" / name).write_text(content)
        name_cached_graphs(tmp_path)
        tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2]
    assert len(set(tags)) == 4
    assert all(tags)
