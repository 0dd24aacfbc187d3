"""Whether a configuration satisfies every rule of parallel/rules, checked before any process group or GPU is taken.

`python -m parallel.validate --rules` prints the rules with what they say.
"""

import copy
import sys

from configs.schema import Config
from parallel.rules import SOUND, Environment, Example, Rule, layout, model, value, values

RULES = [found for module in (values, layout, model) for found in vars(module).values() if isinstance(found, Rule)]


def validate(cfg: Config, environment: Environment) -> list[str]:
    """Every violation, in one sentence each; empty when the configuration can run in this environment."""
    problems = [sentence for r in RULES if not r.listed for sentence in r.check(cfg, environment)]
    return problems or [sentence for r in RULES if r.listed for sentence in r.check(cfg, environment)]


def broken(example: Example) -> list[str]:
    """What is said about an example."""
    cfg = copy.deepcopy(SOUND)
    for key, new in example.items():
        if key not in ("world", "deep_ep", "gpu"):
            parent, _, name = key.rpartition(".")
            setattr(value(cfg, parent) if parent else cfg, name, new)
    world = int(str(example.get("world", 1)))
    return validate(cfg, Environment(world, "train.py +experiment=NAME", "deep_ep" in example, "gpu" not in example))


def main(arguments: list[str]) -> int:
    """Prints every rule: its name, and what it says about each of its examples."""
    if arguments != ["--rules"]:
        print("usage: python -m parallel.validate --rules", file=sys.stderr)
        return 2
    for r in RULES:
        print(r.check.__name__, *(f"  {sentence}" for example in r.examples for sentence in broken(example)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
