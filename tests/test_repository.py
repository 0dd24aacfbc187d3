"""Rules that every tracked file keeps: sizes, comments, nothing of one machine, and a `kernels` folder that harms no other package."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
FILES = [ROOT / name for name in TRACKED if name and (ROOT / name).is_file()]
PYTHON = [path for path in FILES if path.suffix == ".py"]

LONGEST_FUNCTION, LONGEST_FILE = 80, 500  # lines
# Letters in brackets keep these patterns from matching this file.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~}])/(?:home|root|mnt|opt|tmp|Users|w[o]rk)/",
    "a package registry": r"\bp[y]pi\.(?:org|python)|p[y]thonhosted|n[p]mjs|\bconda\.[a]naconda|deb\.[d]ebian|(?:extra-)?ind[e]x-url",
    "an open end": r"\b(?:TO[D]O|FI[X]ME|X[X]X)\b",
    "a number that only a tracker knows": r"\b[Ii]ss[u]e #?\d",
    "a banner": r"^\s*#\s?[-=#*~_]{4,}|^\s*#.*[-=#*~_]{4,}\s*$",
}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def texts() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # recordings and pictures


def test_kernels_package_is_a_docstring() -> None:
    (only,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)
    assert isinstance(only.value.value, str)


@pytest.mark.parity
def test_transformers_imports_beside_our_kernels_folder() -> None:
    pytest.importorskip("transformers")
    code = "import kernels, transformers; from transformers import LlamaModel; print(kernels.__file__, hasattr(kernels, '__version__'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [str(ROOT / "kernels" / "__init__.py"), "False"], result.stderr


def test_nothing_at_run_time_imports_transformers() -> None:
    offenders = []
    for path in PYTHON:
        if path.relative_to(ROOT).parts[0] in ("tests", "perf"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            offenders += [where(path, node.lineno) for name in names if name.split(".")[0] == "transformers"]
    assert offenders == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [where(path, number) for path, text in texts() if path.name != "LICENSE" and not path.match("data/speech/*")
             for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert found == []


def test_functions_and_files_stay_short() -> None:
    too_long = []
    for path in PYTHON:
        text = path.read_text()
        if len(text.splitlines()) > LONGEST_FILE:
            too_long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                too_long.append(f"{where(path, node.lineno)} {node.name}: {node.end_lineno - node.lineno + 1} lines")
    assert too_long == []


def test_pytest_visits_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    folders = {part for path in PYTHON for part in path.relative_to(ROOT).parent.parts}
    skipped = request.config.getini("norecursedirs")
    assert [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in skipped)] == []


def test_every_configuration_key_has_a_default_and_a_comment() -> None:
    path = ROOT / "configs" / "schema.py"
    lines = path.read_text().splitlines()
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    keys = [node for body in classes for node in body.body if isinstance(node, ast.AnnAssign)]
    assert len(keys) > 80
    assert [where(path, key.lineno) for key in keys if key.value is None or not key.end_lineno] == []
    assert [where(path, key.lineno) for key in keys if not re.search(r"  # \S", lines[(key.end_lineno or key.lineno) - 1])] == []


def test_every_shell_script_stops_at_its_first_error() -> None:
    scripts = [path for path, text in texts() if text.startswith("#!") and "sh" in text.splitlines()[0]]
    assert scripts
    assert [str(path) for path in scripts if "set -euo pipefail" not in path.read_text()] == []
