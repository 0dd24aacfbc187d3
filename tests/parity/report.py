"""Our models against their owners': `python -m tests.parity.report`; the last line is one JSON object.

`failed` are cases whose logits, loss, gradients or exports miss their bar. Errors of logits (adapters' too), features and encoder output
are the largest difference over the largest value. `feature_difference` is the largest of the features as it is: the recorded ones are
fp32, and in the quietest bins exact features are as far from them.
"""

import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from tests.dist.first import worst
from tests.parity import adapters, generation, nemo, salm
from tests.parity.check import CASES, check
from tests.parity.results import relative_error

Measured = TypeVar("Measured")


def quiet_transformers() -> ModuleType:
    """The package, told before its models are imported that our folder `kernels` is not the package of that name."""
    import transformers.utils as utils
    from transformers.utils import import_utils

    import_utils.is_kernels_available = utils.is_kernels_available = lambda *args, **kwargs: False
    import transformers

    logging.disable(logging.WARNING)
    utils.logging.disable_progress_bar()
    return transformers


def measure(what: str, names: Iterable[str], figure: Callable[[str, Path], Measured]) -> dict[str, Measured]:
    """What `figure` makes of each name with a folder of its own."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = figure(name, Path(folder))
        print(f"{what}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    transformers = quiet_transformers()
    cases = measure("case", CASES, lambda name, folder: check(transformers, name, folder))
    cases |= measure("case", ["salm"], lambda _, folder: salm.check(folder))
    adapted = measure("adapter", adapters.CASES, lambda name, folder: adapters.worst_error(transformers, name, folder))
    answered = measure("generation", CASES, lambda name, folder: generation.compare(transformers, name, folder))
    features, recorded = nemo.features(torch.float32)
    print(json.dumps({
        "families": len({name.split()[0] for name in cases}), "cases": len(cases),
        "failed": [name for name, errors in cases.items() if not errors.passed],
        "worst_logit_error": worst(e.logits for e in cases.values()), "worst_loss_error": worst(e.loss for e in cases.values()),
        "worst_gradient_error": worst(e.gradients for e in cases.values()),
        "exports_differing": [f"{name}, {what}" for name, errors in cases.items() for what in errors.differing],
        "salm": dataclasses.asdict(cases["salm"]),
        "feature_error": relative_error(features, recorded), "feature_difference": (features - recorded).abs().max().item(),
        "encoder_error": relative_error(*nemo.encoded()),
        "counts_differing": len(set().union(*map(nemo.differing_lengths, nemo.COUNTS))),
        "adapter_error": worst(adapted.values()),
        "generation_differing": sum(len(a.differing) for a in answered.values()),
        "generation_prompts": sum(a.clear for a in answered.values())}))


if __name__ == "__main__":
    main()
