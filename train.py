"""Train a speech language model: `python train.py +experiment=digits`, `torchrun --nproc_per_node=8 train.py +experiment=nemotron_ep8`.

`--cfg job` prints the configuration instead, `--help` every choice and key.
"""

import json
import os
import sys
import time

STARTED = float(os.environ.get("REEDLING_STARTED", time.time()))  # set by make before it installs anything


def main(arguments: list[str]) -> None:
    from training.host import keep_freed_memory

    keep_freed_memory()
    from training import launch

    if {"-h", "--help"} & set(arguments):
        from training import manual

        print(manual.train(__doc__ or ""))
        return
    if "--cfg" in arguments:
        print(launch.show(arguments))
        return
    cfg, device = launch.configure(arguments)
    with launch.reporting():
        outcome = launch.run(cfg, device)
    if launch.rank() == 0:
        wer = {step: sum(sets.values()) / len(sets) for step, sets in outcome.wer.items() if sets}  # mean over the validation sets
        figures = {
            "wer_before": wer.get(0),
            "wer_after": wer.get(outcome.steps),
            "train_seconds": round(outcome.train_seconds, 1),
            "total_seconds": round(time.time() - STARTED, 1),
            "recompiles_after_warmup": outcome.recompiles_after_warmup,
        }
        print(f"interrupted at step {outcome.steps}; the same command continues" if outcome.interrupted
              else f"done: {launch.next_command(cfg)}", flush=True)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
