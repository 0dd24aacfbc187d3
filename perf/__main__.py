"""Figures of speed, accuracy and compilation. Each command prints tables, and one JSON object last; `-h` behind one tells its options."""

import argparse
import json
import sys
from typing import Any

from kernels.launch import ARCHITECTURES
from perf import graphs, plan_check
from perf.cases import UnknownOperation
from training.host import keep_freed_memory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="one training step of the decoder against another implementation")
    step.add_argument("--against", choices=["transformers"], default="transformers")
    step.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    step.add_argument("--lengths", choices=["uniform", "speech"], default="uniform", help="4 × 512 tokens, or 24 utterances of 30 to 600")
    step.add_argument("--rounds", type=int, default=0, help="timed steps of each; 0: 9, or 5 for speech")
    compile_time = commands.add_parser("compile_time", help="compile time of 52 layers over that of 8")
    compile_time.add_argument("--layers", type=int, default=0, help="compile this many in this process instead")
    accuracy = commands.add_parser("accuracy", help="errors of every implementation against fp64")
    accuracy.add_argument("--implementation", help="this one alone, in this process; prints every error")
    accuracy.add_argument("--only", nargs="+", default=[], metavar="OPERATION")
    static = commands.add_parser("compile", help="all kernels compiled for GPUs that need not be there")
    static.add_argument("--arch", nargs="+", default=["all"], choices=["all", *map(str, ARCHITECTURES)])
    static.add_argument("--defaults", action="store_true", help="leave out the configurations that only the tuner tries")
    static.add_argument("--only", nargs="+", default=[], metavar="OPERATION")
    static.add_argument("--save", action="store_true", help="write the table to perf/results")
    cpu = commands.add_parser("cpu", help="CPU versions of the operations against what others would call")
    cpu.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    cpu.add_argument("--rounds", type=int, default=15, help="timed passes of each")
    norms = commands.add_parser("norms", help="what the compiler makes of norms, rotary embedding and depthwise convolution")
    norms.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    norms.add_argument("--rounds", type=int, default=15, help="timed passes of each")
    packing = commands.add_parser("packing", help="a packed row against a padded batch of the same utterances")
    packing.add_argument("--rounds", type=int, default=7, help="timed passes of each")
    layouts = commands.add_parser("graphs", help="graphs, collectives and waits of the host in a step, by layout")
    layouts.add_argument("--order", action="store_true", help="print what a step does in which order")
    check = commands.add_parser("plan_check", help="plan.py's memory and bytes against those of gloo processes")
    for command, names in ((layouts, graphs.LAYOUTS), (check, plan_check.LAYOUTS)):
        command.add_argument("--only", nargs="+", default=[], choices=list(names), metavar="LAYOUT", help=", ".join(names))
    bubble = commands.add_parser("zero_bubble", help="whether gradients of inputs before those of weights shorten a pipeline's step")
    bubble.add_argument("--rounds", type=int, default=9, help="timed steps of each")
    gpu = commands.add_parser("gpu", help="operations at real shapes on a GPU, against other libraries")
    gpu.add_argument("--save", action="store_true", help="write table and plot to perf/results")
    tune = commands.add_parser("tune", help="time the candidates for tile sizes on a GPU and rewrite tuned.json")
    for command in (gpu, tune):
        command.add_argument("--only", nargs="+", default=[], metavar="OPERATION")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The figures and whether they are valid."""
    match arguments.command:
        case "step":
            from perf import step

            return step.run(arguments.dtype, arguments.lengths, arguments.rounds)
        case "compile_time":
            from perf import compile_time

            return compile_time.run(arguments.layers)
        case "accuracy":
            from perf import accuracy

            return accuracy.run(arguments.implementation, arguments.only)
        case "compile":
            from perf import static

            arches = ARCHITECTURES if "all" in arguments.arch else tuple(map(int, arguments.arch))
            return static.run(arches, not arguments.defaults, arguments.save, arguments.only)
        case "cpu":
            from perf import cpu

            return cpu.run(arguments.dtype, arguments.rounds)
        case "norms":
            from perf import norms

            return norms.run(arguments.dtype, arguments.rounds)
        case "packing":
            from perf import packing

            return packing.run(arguments.rounds)
        case "graphs":
            return graphs.run(arguments.only, arguments.order)
        case "plan_check":
            return plan_check.run(arguments.only)
        case "zero_bubble":
            from perf import zero_bubble

            return zero_bubble.run(arguments.rounds)
        case "gpu":
            from perf import gpu

            return gpu.run(arguments.only, arguments.save)
        case "tune":
            from perf import tune

            return tune.run(arguments.only)
    raise AssertionError(arguments.command)


def main() -> int:
    arguments = _parser().parse_args()
    keep_freed_memory()  # as the trainer does; theirs gains from it too
    try:
        result, correct = _run(arguments)
    except UnknownOperation as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    return 0 if correct else 1


if __name__ == "__main__":
    raise SystemExit(main())
