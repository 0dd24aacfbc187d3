"""What --help prints: usage, the choices that configs/ offers, the keys with their types, defaults and comments."""

import inspect
import re
from typing import Any

from configs import schema
from training.config import CONFIG_DIR


def train(usage: str) -> str:
    """Help of train.py."""
    groups = (path for path in sorted(CONFIG_DIR.iterdir()) if path.is_dir() and any(path.glob("*.yaml")))
    choices = [f"{'+' if group.name == 'experiment' else ''}{group.name}=...\n{_choices(group.name)}" for group in groups]
    return "\n".join([usage.strip(), "", *choices, "", "Keys, as in optimizer.lr=1e-3:", *_tree(schema.Config, "")])


def evaluate(usage: str) -> str:
    """Help of evaluate.py."""
    return "\n".join([usage.strip(), "", "Keys, as in set=dev:", *_tree(schema.EvaluateConfig, "")])


def _choices(group: str) -> str:
    """Name and first words of each file of a group."""
    rows = []
    for path in sorted((CONFIG_DIR / group).glob("*.yaml")):
        comments = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#") and "@package" not in line]
        rows.append(f"    {path.stem:18} {comments[0] if comments else ''}".rstrip())
    return "\n".join(rows)


def _tree(kind: Any, place: str) -> list[str]:
    """One line a key: its dotted name, type, default and comment."""
    rows = []
    for line in inspect.getsource(kind).splitlines():
        found = re.match(r"    (\w+): (.+?)(?: = (.+?))?  # (.+)$", line)
        if found is None:
            continue
        name, type_, default, comment = found.groups()
        inner = getattr(schema, type_.removesuffix(" | None"), None)
        if inspect.isclass(inner):
            rows += _tree(inner, f"{place}{name}.")
        else:
            shown = re.sub(r"^field\(default_factory=(?:lambda: )?(.+)\)$", r"\1", default or "MISSING")
            shown = {"MISSING": "must be given", "dict": "{}", "list": "[]"}.get(shown, shown)
            rows.append(f"    {place}{name}: {type_}, {shown}  {comment}")
    return rows
