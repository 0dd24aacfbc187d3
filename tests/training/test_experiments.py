"""Every experiment with published weights: sizes as published, rules kept at its world size, and its tiny twin on the demo's data."""

import json
from pathlib import Path

import pytest
import torch

from configs.schema import Config
from model import hub, params, speech_lm, whisper_mel
from model.hub.families import family_of
from parallel.mesh import make_mesh, start_processes
from parallel.validate import Environment, validate
from tests.dist.first_worker import rows
from training import config, evaluation
from training.state import init_state
from training.step import make_context, make_engine, make_step

PUBLISHED = json.loads((Path(hub.__file__).parent / "published.json").read_text())
EXPERIMENTS = {  # experiment: processes, twin, published language model or whole model
    "nemotron_ep8": (8, "nemotron3_tiny", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"),
    "qwen3_moe_ep8": (8, "qwen3_moe_tiny", "Qwen/Qwen3-30B-A3B"),
    "canary_qwen_lora": (1, "canary_qwen_tiny", "Qwen/Qwen3-1.7B"),
    "glm_asr_nano_zero2": (2, "glm_asr_tiny", "zai-org/GLM-ASR-Nano-2512"),
}
ROW = "{tokens: 256, audio_frames: 176, utterances: 6, utterance_frames: 32, label_tokens: 16}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_sizes_are_the_published_ones(name: str) -> None:
    processes, _, published = EXPERIMENTS[name]
    cfg, missing = config.load([f"+experiment={name}", "model.pretrained=null", "data.manifest=x", "data.tokenizer=x"])
    assert missing == []
    content = PUBLISHED[published]["config"]
    found = family_of(content).read(content)
    if "-" not in found.decoder.pattern:
        found.decoder.mlp_ffn = 0  # published, and of no dense MLP
    assert cfg.model.decoder == found.decoder
    if found.encoder is not None:
        assert (cfg.model.encoder, cfg.model.projector) == (found.encoder, found.projector)
    assert validate(cfg, Environment(processes, "train.py")) == []


def twin(name: str) -> Config:
    cfg, missing = config.load([f"+experiment={name}", f"model={EXPERIMENTS[name][1]}", "data=digits", "parallel=single", "precision=fp32",
                                f"data.rows=[{ROW}]", "compile.enabled=false", "optimizer.warmup_steps=1", "optimizer.lr=0.01"])
    assert missing == []
    assert validate(cfg, Environment(1, "train.py")) == []
    return cfg


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_twins_learn(name: str) -> None:
    cfg = twin(name)
    start_processes(torch.device("cpu"))
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    state = init_state(speech_lm.spec(cfg), cfg.seed, mesh)
    step, losses = make_step(cfg, mesh, make_engine(cfg, mesh)), []
    for _ in range(4):
        state, metrics = step(state, rows(cfg, 0))
        losses.append(metrics["loss"].item())
    assert losses[3] < losses[0] - 0.05


def test_canary_qwen_trains_its_encoder_its_projection_and_low_ranks_alone() -> None:
    cfg, _ = config.load(["+experiment=canary_qwen_lora", "model.pretrained=null", "data.manifest=x", "data.tokenizer=x"])
    trained = [(name, p) for name, p in params.named_leaves(speech_lm.spec(cfg)) if p.kind == "param" and p.trained]
    assert {name.partition(".")[0] for name, _ in trained} == {"encoder", "projector", "decoder"}
    assert sum(torch.Size(p.shape).numel() for name, p in trained if name.startswith("encoder")) == 810_984_448  # as NeMo counts them
    low = [p for name, p in trained if name.startswith("decoder.")]
    # 28 blocks, rank 128: queries [2048, 2048], values [1024, 2048]
    assert sum(torch.Size(p.shape).numel() for p in low) == 28 * 128 * (2048 + 2048 + 2048 + 1024)
    assert sum(torch.Size(p.shape).numel() for name, p in trained if name.startswith("projector")) == 1024 * 2048 + 2048


def test_the_picture_of_an_utterance_is_what_its_encoder_sees() -> None:
    cfg = twin("glm_asr_nano_zero2")
    start_processes(torch.device("cpu"))
    mesh, batch = make_mesh(cfg.parallel, torch.device("cpu")), rows(cfg, 0)[0]
    seen_AM = whisper_mel.log_mel(batch["audio_S"], make_context(cfg, batch, mesh, training=False))
    assert torch.equal(evaluation.mel_picture(cfg, mesh, batch), seen_AM[: 8 * int(batch["audio_lengths_U"][0])].t())
