"""Under torchrun: gradients of the adapters of a digits model on two fixed rows, as one JSON object: lora_worker LAYOUT..."""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from model import params, speech_lm
from parallel import sharding
from parallel.mesh import make_mesh, start_processes
from tests.dist.first_worker import ROWS, rows, whole
from tests.dist.launch import leave
from training import config
from training.state import State, init_state
from training.step import make_engine, make_gradients

SMALL = ["+experiment=digits", "compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*E", "model.lora.rank=3",
         "model.decoder.mamba_heads=8", r"model.freeze_params=['encoder\.','decoder\.','projector','ctc']",
         "model.encoder.freeze_batch_norm=true"]
VARIANTS = {
    "dropout and dora": [r"model.lora.targets=['decoder\.layers\.[01]','decoder.*shared','encoder.*linear_[qv]']", "model.lora.dropout=0.3",
                         "model.lora.dora=true"],
    "experts": [r"model.lora.targets=['.*experts\.']"],
}


def gradients(name: str, overrides: list[str]) -> dict[str, Any]:
    """Of every adapter, flat and whole; b starts at random values, since a has no gradient where b is zero."""
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, *VARIANTS[name], *overrides])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    spec = dict(params.named_leaves(speech_lm.spec(cfg)))
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh)
    drawn = {n: sharding.shard(p, params.draw(n, replace(p, init="normal", std=0.2), 5), mesh) for n, p in spec.items() if n.endswith("_lora.b")}
    state = State(3, state.params | drawn, state.buffers, state.first, state.second)
    mine = rows(cfg, 0)[slice(mesh.dp_rank, None, mesh.dp)] if mesh.dp > 1 else rows(cfg, 0)[:ROWS]
    grads = make_gradients(cfg, mesh, make_engine(cfg, mesh))(state, mine).grads
    return {n: grad.flatten().tolist() for n, grad in whole(spec, grads, mesh).items()}


if __name__ == "__main__":
    made = {layout: {name: gradients(name, [layout]) for name in VARIANTS} for layout in sys.argv[1:]}
    leave(made)
