"""The audio of a row divided over ranks: all windows together give the frames and the losses of the row encoded at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.packing import AUDIO, Example, pack_row
from kernels.lookup import lookup
from model import ctc, projector, speech_lm
from model.context import Context
from parallel import audio
from parallel.mesh import make_mesh, start_processes
from tests.dist.cells import MODEL
from training import config
from training.engine import Pass
from training.state import init_state
from training.step import make_context, make_engine, state_dtype


@pytest.mark.parametrize(("kind", "frames", "seconds"), [
    ("fastconformer", 48, (3.5,)), ("fastconformer", 48, (0.3, 1.2, 0.0, 0.01, 0.9, 0.5)), ("fastconformer", 48, ()),
    ("glm_asr", 48, (0.3, 1.2, 0.0, 0.01, 0.9, 0.5)), ("whisper_30s", 800, (0.3, 1.2))])
def test_windows_together_are_the_row(kind: str, frames: int, seconds: tuple[float, ...]) -> None:
    row = f"{{tokens: 96, audio_frames: {frames}, utterances: 8, utterance_frames: 45, label_tokens: 6}}"
    weight = 0.3 if kind == "fastconformer" else 0.0
    cfg, _ = config.load([*MODEL, "precision=fp64", f"model.encoder.kind={kind}", f"train.ctc_weight={weight}", f"data.rows=[{row}]"])
    start_processes(torch.device("cpu"))
    mesh = make_mesh(cfg.parallel, torch.device("cpu"))
    engine, leaves = make_engine(cfg, mesh), init_state(speech_lm.spec(cfg), 0, mesh, state_dtype(cfg)).leaves()
    rng = np.random.default_rng(len(seconds))
    examples = [Example(str(i), [AUDIO], rng.integers(3, 50, size=i % 4).tolist(), [1],
                        rng.standard_normal(int(16000 * sec)).astype(np.float32)) for i, sec in enumerate(seconds)]
    batch = {name: torch.from_numpy(value) for name, value in pack_row(examples, cfg.data.rows[0], kind).items()}
    ctx = make_context(cfg, batch, mesh, training=False)

    def encoded(batch: dict[str, Tensor], ctx: Context) -> tuple[Tensor, Tensor]:
        run = Pass(engine, leaves, ctx)
        x_AD = speech_lm.encode(run, batch, ctx, {})
        loss = run(("ctc",), ctc.loss, x_AD, batch["ctc_labels_UL"], batch["ctc_lengths_U"]) if weight else torch.zeros(())
        return run(speech_lm.projector_unit(ctx.encoder), projector.forward, x_AD)[0].detach(), loss.detach()

    whole_AD, whole_loss = encoded(batch, ctx)
    expected_TD = lookup(whole_AD, batch["frames_T"])
    assert bool(expected_TD.abs().sum()) == any(sec > 0.05 for sec in seconds)
    for ranks in (2, 3, 8):
        parts = [audio.own_utterances(batch, ctx, ranks, rank) for rank in range(ranks)]
        fields: list[dict[str, Any]] = [{name: part[name] for name in audio.FIELDS} for part in parts]
        found = [encoded(part, replace(ctx, **own)) for part, own in zip(parts, fields, strict=True)]
        assert len(found[0][0]) == audio.window_frames(ctx, ranks) <= -(-frames // ranks) + max(45, 375)
        for part in parts:
            torch.testing.assert_close(lookup(torch.cat([x_AD for x_AD, _ in found]), part["frames_T"]), expected_TD, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sum(loss for _, loss in found), whole_loss, rtol=1e-9, atol=1e-9)
