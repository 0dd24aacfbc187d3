"""What no machine without a GPU shows otherwise: a step with a GPU's kernels on fake tensors of a device that is not the default one.

Tensors on "cpu:0" and on "cpu" count as on two devices among fake tensors, and mixing them is an error, as it is with a GPU.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from data.loader import empty_batch
from parallel.mesh import make_mesh
from perf.planning.costs import Load
from perf.planning.trace import empty_state, processes, replaced
from training import config, evaluation, generation
from training.step import make_context, make_engine, make_step, to_device, warm_up

ELSEWHERE = torch.device("cpu", 0)
HYBRID = ["+experiment=nemotron_ep8", "model=nemotron3_tiny", "data=digits"]
SPEECH = ["+experiment=glm_asr_nano_zero2", "model=glm_asr_tiny", "data=digits"]
CASES = {
    "digits": (1, ["+experiment=digits", "train.ctc_weight=0.3", "model.encoder.conv_norm=batch_norm", "precision=bf16"]),
    "split row": (8, [*HYBRID, "parallel.ep=2", "parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ring"]),
    "two stages": (8, [*HYBRID, "parallel.ep=2", "parallel.ep_dispatch=alltoall", "parallel.pp=2", "parallel.zero_stage=2",
                       "train.accumulate=2", "train.activation_checkpointing=selective"]),
    "on the host": (2, [*SPEECH, "parallel.zero_stage=3", "parallel.offload=parameters"]),
}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("name", CASES)
def test_a_step_an_evaluation_and_an_answer_mix_no_devices(name: str) -> None:
    world, overrides = CASES[name]
    cfg, problems = config.load([*overrides, "compile.enabled=false"])
    assert not problems
    cfg.generation.max_new_tokens = 2
    with ExitStack() as stack:
        stack.enter_context(processes(world))
        stack.enter_context(replaced(cfg, True, 80e9, Load(10, 8, 8)))
        places = make_mesh(cfg.parallel, ELSEWHERE)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for read, value in (("item", 1.0), ("__int__", 1), ("__bool__", False)):  # fakes have no values
            stack.enter_context(mock.patch.object(Tensor, read, lambda t, value=value: value))
        stack.enter_context(mock.patch.object(torch, "tensor", lambda data, device=None: torch.as_tensor(data).to(device)))
        state, engine = empty_state(cfg, places), make_engine(cfg, places)
        row = to_device(empty_batch(cfg.data.rows[-1], cfg.data.encoder, cfg.data.queries), places)
        assert {t.device for t in row.values()} == {ELSEWHERE}
        state, metrics = make_step(cfg, places, engine)(state, [row] * cfg.train.accumulate)
        assert {t.device for t in metrics.values()} == {ELSEWHERE}
        warm_up(cfg, places, engine, state, row)
        evaluation.validation_loss(cfg, places, engine, state, [row])
        weights = generation.Weights(cfg, places, engine, state.leaves())
        stack.enter_context(mock.patch.object(generation, "every_rank", lambda flag, device: flag))
        context = make_context(cfg, row, places, training=False, split=False)
        (answer,) = generation.generate(weights, row, context, longest=20, stop_ids=[1, 2], names=["a"])
        assert len(answer) == 2
