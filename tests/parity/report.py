"""All cases of all families: `python -m tests.parity.report`; the last line is one JSON object."""

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from tests.parity.check import CASES, check


def quiet_transformers() -> ModuleType:
    """The package, told before its models are imported that our folder `kernels` is not the package of that name."""
    import transformers.utils as utils
    from transformers.utils import import_utils

    import_utils.is_kernels_available = utils.is_kernels_available = lambda *args, **kwargs: False
    import transformers

    logging.disable(logging.WARNING)
    utils.logging.disable_progress_bar()
    return transformers


def main() -> None:
    transformers, found = quiet_transformers(), {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = check(transformers, name, Path(folder))
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps({
        "families": len({name.split()[0] for name in found}), "cases": len(found),
        "failed": [name for name, errors in found.items() if not errors.passed],
        "worst_logit_error": max(e.logits for e in found.values()), "worst_loss_error": max(e.loss for e in found.values()),
        "worst_gradient_error": max(e.gradients for e in found.values())}))


if __name__ == "__main__":
    main()
