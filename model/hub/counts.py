"""Parameter counts of full-size published models, from shapes alone, against the numbers that their owners give."""

import json
import math
from pathlib import Path
from typing import Any

from model.hub.families import family_of
from model.hub.family import layouts


def compare() -> dict[str, Any]:
    """Number of models, and those whose count differs; prints a line for each."""
    published: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    mismatched = []
    for name, entry in published.items():
        found = count(entry["config"])
        print(f"{name}: {found:,} parameters, published {entry['parameters']:,}")
        if found != entry["parameters"]:
            mismatched.append(name)
    return {"families": len({family_of(entry["config"]).name for entry in published.values()}), "models": len(published),
            "mismatched": mismatched}


def count(content: dict[str, Any]) -> int:
    """Parameters (no buffers) of the model that a config.json describes, summed over the tensors of its files."""
    family = family_of(content)
    cfg = family.read(content)
    return sum(math.prod(block.shape) for entry in layouts(family, cfg)[0] if entry.p.kind == "param" for block in entry.blocks)
