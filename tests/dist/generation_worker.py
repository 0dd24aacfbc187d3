"""Under torchrun: transcripts of the held-out digit strings by a random model, as one JSON object: generation_worker OVERRIDES..."""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from data.loader import decoding_batches
from data.tokenizer import load_tokenizer
from model.stages import own_spec
from parallel.mesh import make_mesh, start_processes
from tests.dist.launch import leave
from training import config
from training.evaluation import transcribe
from training.generation import Weights
from training.state import init_state
from training.step import make_engine

SMALL = ["+experiment=digits", "compile.enabled=false", "model.encoder.n_layers=1", "model.decoder.pattern=M*E", "model.decoder.init_std=0.3",
         "model.decoder.mamba_heads=10", "data.validation_utterances=7", "data.workers=0", "generation.max_new_tokens=10",
         "data.rows=[{tokens: 300, audio_frames: 260, utterances: 2, utterance_frames: 144, label_tokens: 72}]"]


def transcripts(overrides: list[str]) -> dict[str, Any]:
    """Of this number of processes: how many rows this one had, and the transcripts of all."""
    start_processes(torch.device("cpu"))
    cfg, _ = config.load([*SMALL, *overrides])
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    weights = Weights(cfg, mesh, make_engine(cfg, mesh), init_state(own_spec(cfg, mesh.pp_rank), 3, mesh).leaves())
    batches = list(decoding_batches(cfg.data, "held_out", mesh.dp_rank, mesh.dp))
    found = transcribe(weights, batches, load_tokenizer(cfg.data))
    return {"rows": len(batches), "transcripts": [asdict(t) for t in found]}


if __name__ == "__main__":
    made = transcripts(sys.argv[1:])
    leave(made)
