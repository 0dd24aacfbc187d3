"""Compile time of a model of 52 layers over that of one of 8, of the same four kinds, each in its own process with a cold cache."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

PATTERN = "MEM*EM-EMEM*E" * 4  # all four kinds among its first 8 letters


def run(layers: int) -> tuple[dict[str, Any], bool]:
    """Seconds of both sizes and their ratio; with `layers`, of that many layers in this process."""
    if layers:
        return {"layers": layers, "seconds": seconds(layers)}, True
    short, long = (_own_process(n) for n in (8, len(PATTERN)))
    return {"ratio": round(long / short, 3), "seconds_8_layers": round(short, 2), f"seconds_{len(PATTERN)}_layers": round(long, 2)}, True


def _own_process(layers: int) -> float:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "perf", "compile_time", "--layers", str(layers)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def seconds(layers: int) -> float:
    """Time of the first training step less that of a later one."""
    import torch

    from configs.schema import DecoderConfig
    from model import decoder, params
    from perf.text_model import TextModel, pack, single_process

    cfg = DecoderConfig(pattern=PATTERN[:layers], d_model=64, vocab_size=256, n_heads=4, n_kv_heads=2, head_dim=16, mamba_heads=8,
                        mamba_head_dim=16, mamba_groups=2, mamba_state=16, mamba_chunk=64, mlp_ffn=128, n_experts=8, top_k=2, moe_ffn=64,
                        shared_ffn=128)
    model = TextModel(cfg, torch.float32, params.init(decoder.spec(cfg), seed=0), single_process())
    row = pack([torch.randint(0, cfg.vocab_size, (n,)) for n in (100, 60, 80)], 256, cfg, torch.float32)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        model.step(row)
        times.append(time.perf_counter() - start)
    return times[0] - statistics.median(times[1:])
