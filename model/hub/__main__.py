"""Published checkpoints on the command line.

python -m model.hub inspect PATH          what a folder or a .nemo file holds, and whether it can be loaded
python -m model.hub convert PATH OUT      a run's folder or checkpoint, or a published one, as a Hugging Face folder, or like a .nemo file
python -m model.hub adapter PATH OUT      the adapters of a run as a folder that peft opens
python -m model.hub verify PATH [OTHER]   that all values are finite; with OTHER, that both hold the same numbers; ends with 1 if not
python -m model.hub counts                parameters of full-size models, on shapes alone, against the published numbers

The last line is one JSON object. Little memory is needed: tensors are read and written one at a time.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from model.hub import counts, tools
from model.hub.family import HubError
from model.hub.save import LIMIT_BYTES

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inspect").add_argument("path", type=Path)
    convert = commands.add_parser("convert")
    convert.add_argument("path", type=Path)
    convert.add_argument("out", type=Path)
    convert.add_argument("--like", type=Path, help="a published folder whose config.json, tokenizer, names and types are kept")
    convert.add_argument("--dtype", choices=DTYPES, help="of the tensors, but for buffers and what --like or a published PATH keeps wider "
                         "than most; without it the types there, else bf16")
    convert.add_argument("--limit", type=float, default=LIMIT_BYTES / 1e9, metavar="GB", help="largest file; a SALM is one file")
    adapter = commands.add_parser("adapter")
    adapter.add_argument("path", type=Path)
    adapter.add_argument("out", type=Path)
    for command in (convert, adapter):
        command.add_argument("--family", help="of a run that was not started from a published folder: the model_type to write")
    adapter.add_argument("--like", type=Path, help="the published folder of the frozen model")
    verify = commands.add_parser("verify")
    verify.add_argument("path", type=Path)
    verify.add_argument("other", type=Path, nargs="?")
    commands.add_parser("counts")
    return parser.parse_args(given)


def run(given: list[str]) -> dict[str, Any]:
    """What the command finds, after a line for each thing worth saying."""
    args = arguments(given)
    if args.command == "inspect":
        return tools.inspect(args.path)
    if args.command == "convert":
        return tools.convert(args.path, args.out, args.like, args.family, DTYPES.get(args.dtype), int(args.limit * 1e9))
    if args.command == "adapter":
        return tools.export_adapter(args.path, args.out, args.like, args.family)
    if args.command == "verify":
        return tools.verify(args.path, args.other)
    return counts.compare()


def main(given: list[str]) -> int:
    """Prints what the command finds, as one JSON object, and returns how the process ends."""
    started = time.perf_counter()
    try:
        found = run(given)
    except HubError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found | {"seconds": round(time.perf_counter() - started, 1)}))
    return 1 if found.get("not_finite") or found.get("different") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
