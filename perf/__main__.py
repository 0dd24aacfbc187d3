"""python -m perf step | compile_time: figures of speed. The last line printed is one JSON object."""

import argparse
import json

from training.host import keep_freed_memory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="one training step of the decoder against another implementation")
    step.add_argument("--against", choices=["transformers"], default="transformers")
    step.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    step.add_argument("--lengths", choices=["uniform", "speech"], default="uniform", help="4 × 512 tokens, or 24 utterances of 30 to 600")
    step.add_argument("--rounds", type=int, default=0, help="timed steps of each; 0: 9, or 5 for speech")
    compile_time = commands.add_parser("compile_time", help="compile time of 52 layers over that of 8")
    compile_time.add_argument("--layers", type=int, default=0, help="compile this many in this process instead")
    arguments = parser.parse_args()
    keep_freed_memory()  # as the trainer does; theirs gains from it too
    if arguments.command == "step":
        from perf import step as step_benchmark

        result, correct = step_benchmark.run(arguments.dtype, arguments.lengths, arguments.rounds)
    else:
        from perf import compile_time as compile_benchmark

        result, correct = compile_benchmark.run(arguments.layers)
    print(json.dumps(result), flush=True)
    return 0 if correct else 1


if __name__ == "__main__":
    raise SystemExit(main())
