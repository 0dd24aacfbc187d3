"""Operators in C++: compiled once, again when their source changes; what is missing or wrong is named."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import native

SOURCE = 'extern "C" int answer() {{ return {}; }}'


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    native.operators.cache_clear()
    yield
    native.operators.cache_clear()


def test_a_source_is_compiled_once_and_again_after_a_change(tmp_path: Path) -> None:
    answers: dict[Path, int] = {}
    source = tmp_path / "one.cpp"
    for answer in (7, 8, 7):
        source.write_text(SOURCE.format(answer))
        native.operators.cache_clear()
        native.operators(source)
        for library in set((tmp_path / "reedling").glob("*.so")) - set(answers):
            answers[library] = ctypes.CDLL(str(library)).answer()
    assert list(answers.values()) == [7, 8]


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="^kernels/attention/cpu.cpp needs a C\\+\\+ compiler and no-such-compiler is not there: "
                                           "install g\\+\\+ or name another one in CXX$"):
        native.operators(Path("kernels/attention/cpu.cpp"))


def test_what_the_compiler_says_is_shown_and_nothing_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int main() { return nonsense; }")
    with pytest.raises(RuntimeError, match="(?s)wrong.cpp.* failed:.*nonsense"):
        native.operators(source)
    assert not list((tmp_path / "reedling").glob("*.so"))


def test_processes_compile_into_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of a process that was killed goes on, without the lock, while another process compiles."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$last" >> {log}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for pid in (7, 8):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with pytest.raises(RuntimeError, match="failed"):
            native.operators(native.HEADER)
    assert len(set(log.read_text().split())) == 2
