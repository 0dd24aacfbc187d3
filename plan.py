"""What a run would need and take, without its hardware and data: `python plan.py +experiment=nemotron_ep8 gpu=h200`.

    gpu=h100|h200|b200|a100|rtx4090   world=64 (ranks; without it the fewest of whole nodes that the layout allows)
    row=8192 (tokens of a row)        fill=0.9 (share of a row that is no padding; without it all)
    picture=runs/plan.png             imbalance=1.5 (tokens of the fullest expert rank over the mean; without it as random routing makes it)
    everything else as for train.py

`python plan.py search +experiment=nemotron_ep8 gpu=h100 world=64 row=8192` tries layouts and lists the fastest that fit.
"""

import json
import sys
import time

OWN = ("gpu", "world", "row", "fill", "imbalance", "picture")


def main(arguments: list[str]) -> int:
    started = time.perf_counter()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    from perf.planning import command

    own = dict(argument.split("=", 1) for argument in arguments if argument.split("=", 1)[0] in OWN and "=" in argument)
    others = [argument for argument in arguments if argument != "search" and argument.split("=", 1)[0] not in OWN]
    try:
        result = (command.search if "search" in arguments else command.show_plan)(own, others, started)
    except command.Refused as refused:
        print(*(f"error: {sentence}" for sentence in refused.args), sep="\n", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
