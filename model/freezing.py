"""Which parameters are trained: patterns over their dotted paths, with the meaning of NeMo's freeze_params and prevent_freeze_params."""

from collections.abc import Sequence
from dataclasses import replace

from model import params
from model.params import Tree


def freeze(spec: Tree, patterns: Sequence[str], exceptions: Sequence[str]) -> Tree:
    """`spec` with every parameter marked as not trained whose path begins with a match of one of `patterns` and of none of `exceptions`.

    A frozen parameter has no gradient, no moments, and no part in the communication of gradients.
    """
    if not patterns:
        return spec
    return params.map_named(lambda path, p: replace(
        p, trained=p.trained and (params.chosen(path, exceptions) or not params.chosen(path, patterns))), spec)


def unmatched(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The patterns that no parameter's path matches: misspelt ones, mostly."""
    return [pattern for pattern in patterns if not any(params.chosen(path, [pattern]) for path in paths)]
