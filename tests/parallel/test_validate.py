"""One violation a rule: the sentence names the key and its value, and nothing else is reported."""

import ast
import copy
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from configs.schema import Config, EncoderConfig, QFormerConfig, RowSize
from parallel.rules import SOUND, Environment, layout, model, value, values
from parallel.rules.values import AT_LEAST_ONE, CHOICES, NOT_NEGATIVE
from parallel.validate import RULES, broken, main, validate


def sound() -> Config:
    return copy.deepcopy(SOUND)


def check(cfg: Config, world: int) -> list[str]:
    return validate(cfg, Environment(world, "train.py +experiment=x"))


def put(cfg: Config, key: str, new: object) -> None:
    parent, _, name = key.rpartition(".")
    setattr(value(cfg, parent) if parent else cfg, name, new)


def test_a_sound_configuration_passes() -> None:
    assert check(sound(), 1) == []
    cfg = sound()
    cfg.parallel.ep = 8
    assert check(cfg, 8) == []
    assert check(cfg, 16) == []


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_names(key: str) -> None:
    cfg = sound()
    put(cfg, key, "nonsense")
    (sentence,) = check(cfg, 1)
    assert sentence.startswith(f"{key}=nonsense is unknown")
    assert CHOICES[key][0] in sentence


@pytest.mark.parametrize(("key", "least"), [(k, 1) for k in AT_LEAST_ONE] + [(k, 0) for k in NOT_NEGATIVE])
def test_sizes_below_their_least(key: str, least: int) -> None:
    cfg = sound()
    put(cfg, key, least - 1)
    assert f"{key}={least - 1} is too small; it must be at least {least}" in check(cfg, 1)
    put(cfg, key, least)
    assert not any("too small" in sentence for sentence in check(cfg, 1))


@pytest.mark.parametrize(("changes", "world", "pattern"), [
    ({"parallel.offload": "nvme"}, 1, r"^parallel.offload=nvme cannot be kept on the host; choose one of none, optimizer, param"),
    ({"parallel.offload": "offload_optimizer", "compile.scope": "step"}, 1, r"^parallel.offload=offload_optimizer moves .*scope=layer$"),
    ({"parallel.offload": "offload_optimizer", "parallel.zero_stage": 1}, 1, None),
    ({"parallel.offload": "CPUOffloadPolicy", "parallel.zero_stage": "deepspeed_stage_2"}, 1,
     r"^parallel.offload=CPUOffloadPolicy lets .*zero_stage=deepspeed_stage_2 keeps them; .* or parallel.offload=optimizer$"),
    ({"optimizer.master_dtype": "bf16", "precision": "fp32"}, 1, r"^optimizer.master_dtype=bf16 is narrower than precision=fp32.* fp32$"),
    ({"optimizer.master_dtype": "bf16", "compile.scope": "step"}, 1, r"^optimizer.master_dtype=bf16 would round .* compile.scope=layer$"),
    ({"optimizer.moment_dtype": "bf16", "compile.scope": "step", "precision": "fp32"}, 1, None),
    ({"parallel.ep": 8}, 1, r"^parallel.ep=8 needs .* of 8, and there is 1; type torchrun --nproc_per_node=8 train.py \+experiment=x$"),
    ({"parallel.ep": 4}, 6, r"^parallel.ep=4 needs .* there are 6; type torchrun --nproc_per_node=8 train.py \+experiment=x$"),
    ({"parallel.ep": 3}, 3, r"^parallel.ep=3 does not divide model.decoder.n_experts=128"),
    ({"parallel.dp_replicate": 3}, 4, r"^parallel.dp_replicate=3 does not divide the 4 data-parallel ranks; choose a divisor of 4$"),
    ({"parallel.pp": 2}, 2, None),
    ({"parallel.pp": 4}, 2, r"^parallel.pp=4 needs a number of processes that is a multiple of 4, and there are 2; .*=4 train"),
    ({"parallel.pp": 2, "parallel.ep": 2}, 2, r"^parallel.pp=2 and parallel.ep=2 needs a number .* multiple of 4, and there are 2"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "ZBVZeroBubble"}, 2,
     r"^parallel.pp_schedule=ZBVZeroBubble has two stages a rank and parallel.pp_chunks=1; set it to 2$"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "v_schedule", "parallel.pp_chunks": 2}, 2, None),
    ({"parallel.pp": 2, "parallel.pp_schedule": "DualPipeV", "parallel.pp_chunks": 2, "train.accumulate": 3}, 2,
     r"^parallel.pp_schedule=DualPipeV needs as many rows a step as stages, 4, and train.accumulate=3; raise it, or choose zbv$"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "DualPipeV", "parallel.pp_chunks": 2, "train.accumulate": 4}, 2, None),
    ({"parallel.pp": 2, "parallel.pp_schedule": "zero_bubble"}, 2, None),
    ({"parallel.pp": 2, "parallel.pp_schedule": "zero_bubble", "parallel.pp_chunks": 2, "train.accumulate": 5}, 2,
     r"^train.accumulate=5 makes no equal rounds for parallel.pp_schedule=zero_bubble over 2 ranks; choose 4 or 6$"),
    ({"parallel.pp_schedule": "zigzag"}, 1, r"^parallel.pp_schedule=zigzag is no schedule of a pipeline; choose one of gpipe, 1f1b"),
    ({"parallel.pp_layers": [1, 1]}, 1, r"^parallel.pp_layers=\[1, 1\] needs a pipeline, and parallel.pp=1"),
    ({"parallel.pp": 2, "parallel.pp_chunks": 2}, 2, r"^parallel.pp_schedule=1f1b has one stage .*pp_chunks=2; set it to 1"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "looped_bfs"}, 2, r"^parallel.pp_schedule=looped_bfs has two or more .*; set it to 2$"),
    ({"parallel.pp": 2, "parallel.pp_layers": [0, 2]}, 2, None),
    ({"parallel.pp": 2, "parallel.pp_layers": [3, -1]}, 2, r"^parallel.pp_layers=\[3, -1\] must give 2 stages 2 layers together"),
    ({"parallel.pp": 4, "parallel.pp_layers": [1, 0, 1, 0]}, 4, r"^parallel.pp_layers=\[1, 0, 1, 0\] must give 4 stages"),
    ({"parallel.pp": 4}, 4, None),  # the first has the encoder and the last the head, without a layer
    ({"parallel.pp": 5}, 5, r"^model.decoder.pattern has 2 layers, too few for 5 stages"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "dfs", "parallel.pp_chunks": 2, "train.accumulate": 5}, 2,
     r"^train.accumulate=5 makes no equal rounds for parallel.pp_schedule=dfs over 2 ranks; choose 4 or 6$"),
    ({"parallel.pp": 2, "parallel.pp_schedule": "interleaved1f1b", "parallel.pp_chunks": 2, "train.accumulate": 6}, 2, None),
    ({"parallel.pp": 2, "compile.scope": "step"}, 2, r"^compile.scope=step makes one graph of the model and parallel.pp=2"),
    ({"parallel.cp": 2}, 3, r"^parallel.cp=2 needs a number of processes that is a multiple of 2, .*nproc_per_node=4 train"),
    ({"parallel.cp": 2, "parallel.tp": 2, "data.rows": [RowSize(104, 90, 4, 40, 20)]}, 2,
     r"^parallel.cp=2 and parallel.tp=2 needs a number .* multiple of 4, and there are 2"),
    ({"parallel.cp": 2, "data.rows": [RowSize(102, 90, 4, 40, 20)]}, 2,
     r"^data.rows\[0\].tokens=102 is not a multiple of 4, which parallel.cp=2 needs; choose one$"),
    ({"parallel.tp": 3, "model.decoder.pattern": "*", "model.decoder.n_kv_heads": 1, "data.rows": [RowSize(102, 90, 4, 40, 20)]}, 3,
     r"^model.decoder.n_heads=32 is not a multiple of 3, which parallel.tp=3 needs; choose one$"),
    ({"parallel.tp": 4, "model.decoder.pattern": "W", "model.decoder.n_kv_heads": 8, "model.decoder.n_heads": 24,
      "data.rows": [RowSize(120, 90, 4, 40, 20)], "parallel.cp": 1}, 4, None),
    ({"parallel.tp": 4, "model.decoder.pattern": "*", "model.decoder.n_kv_heads": 6, "model.decoder.n_heads": 24,
      "data.rows": [RowSize(120, 90, 4, 40, 20)]}, 4, r"^model.decoder.n_kv_heads=6 splits over parallel.tp=4 neither evenly nor"),
    ({"parallel.cp": 2, "parallel.tp": 2, "model.decoder.pattern": "M", "model.decoder.mamba_heads": 6, "model.decoder.mamba_groups": 2,
      "data.rows": [RowSize(104, 90, 4, 40, 20)]}, 4, r"^model.decoder.mamba_heads=6 is not a multiple of 4, which parallel.cp=2 and"),
    ({"parallel.cp": 2, "model.decoder.pattern": "M", "model.decoder.mamba_heads": 6, "model.decoder.mamba_groups": 3}, 2,
     r"^model.decoder.mamba_groups=3 splits over parallel.cp=2 neither evenly nor with whole ranks to a group$"),
    ({"parallel.tp": 4, "model.decoder.pattern": "-", "model.decoder.mlp_ffn": 30, "data.rows": [RowSize(104, 90, 4, 40, 20)]}, 4,
     r"^model.decoder.mlp_ffn=30 is not a multiple of 4"),
    ({"parallel.tp": 4, "model.decoder.pattern": "E", "model.decoder.shared_ffn": 30, "data.rows": [RowSize(104, 90, 4, 40, 20)]}, 4,
     r"^model.decoder.shared_ffn=30 is not a multiple of 4"),
    ({"data.sample_rate": 8000}, 1, r"^data.sample_rate=8000 is not the 16000 Hz of the features; leave it at 16000"),
    ({"optimizer.betas": (0.9, 1.0)}, 1, r"^optimizer.betas=\[0.9, 1.0\] must be at least 0 and less than 1"),
    ({"optimizer.betas": (float("nan"), 0.9)}, 1, r"^optimizer.betas=\[nan, 0.9\] must be"),
    ({"optimizer.eps": 0.0}, 1, r"^optimizer.eps=0.0 must be above 0"),
    ({"optimizer.lr": float("nan")}, 1, r"^optimizer.lr=nan is too small"),
    ({"model.decoder.time_step_min": 0.2}, 1, r"^model.decoder.time_step_min=0.2 must be at least 0 and at most"),
    ({"parallel.ep": 2, "parallel.ep_dispatch": "deepep"}, 2,
     r"^parallel.ep_dispatch=deepep needs the package deep_ep and an NVIDIA GPU, which are not here; choose alltoall$"),
    ({"parallel.ep_dispatch": "deepep"}, 1, None),  # nothing is sent
    ({"train.activation_checkpointing": "all"}, 1,
     r"^train.activation_checkpointing=all is unknown; choose none, selective, full, or a number between 0 and 1$"),
    ({"train.activation_checkpointing_encoder": "1.0"}, 1, r"^train.activation_checkpointing_encoder=1.0 is unknown"),
    ({"train.activation_checkpointing": "0.3"}, 1, None),
    ({"train.activation_checkpointing": "0.3", "compile.scope": "step"}, 1,
     r"^train.activation_checkpointing=0.3 is a share that compiled layers keep; choose compile.enabled=true with compile.scope=layer, or"),
    ({"parallel.zero_stage": 0, "parallel.dp_replicate": 2}, 4, r"^parallel.dp_replicate=2 has no meaning with parallel.zero_stage=0"),
    ({"parallel.zero_stage": "zero"}, 1, r"^parallel.zero_stage=zero is no zero stage; choose 0, 1, 2, 3 or one of ddp, fsdp2, "),
    ({"parallel.zero_stage": 4}, 1, r"^parallel.zero_stage=4 is no zero stage"),
    ({"parallel.zero_stage": "optim", "compile.scope": "step"}, 1, r"^parallel.zero_stage=optim keeps weights from row to row"),
    ({"parallel.zero_stage": 2, "compile.scope": "step"}, 1, r"^parallel.zero_stage=2 keeps weights from row to row"),
    ({"parallel.defer_grad_sync": True, "compile.scope": "step"}, 1, r"^parallel.defer_grad_sync=true keeps gradients from row to row"),
    ({"parallel.defer_grad_sync": "never"}, 1, r"^parallel.defer_grad_sync=never is unknown; choose one of auto, true, false$"),
    ({"model.encoder.n_heads": 7}, 1, r"^model.encoder.n_heads=7 does not divide model.encoder.d_model=1024"),
    ({"model.encoder.conv_kernel": 8}, 1, r"^model.encoder.conv_kernel=8 is even"),
    ({"model.encoder.d_model": 33, "model.encoder.n_heads": 3}, 1, r"^model.encoder.d_model=33 is odd"),
    ({"model.encoder.kind": "glm_asr", "train.ctc_weight": 0.5}, 1,
     r"^train.ctc_weight=0.5 needs frames of a fast"),
    ({"model.encoder": None, "data.kind": "text", "train.ctc_weight": 0.5}, 1,
     r"^train.ctc_weight=0.5 needs frames of an encoder and model.encoder=null; set it to 0$"),
    ({"model.encoder.kind": "whisper", "model.encoder.max_positions": 159}, 1,
     r"^data.rows holds utterances of 160 frames .*max_positions=159; set utterance_frames to 39 at most$"),
    ({"data.queries": 8}, 1, r"^data.queries=8 is not model.projector.qformer.queries=0; leave it to"),
    ({"model.encoder.kind": "glm_asr", "model.projector.conformer": EncoderConfig()}, 1, r"^model.projector.conformer needs frames of a"),
    ({"model.projector.hidden": 8, "model.projector.encoder_layers": [31]}, 1, r"^model.projector.hidden=8 cannot .*encoder_layers; leave"),
    ({"model.projector.conformer": EncoderConfig(), "model.projector.encoder_layers": [31]}, 1, r"^model.projector.conformer cannot be"),
    ({"model.projector.qformer": QFormerConfig(64), "data.queries": 64}, 1, r"^model.projector.encoder_layers is empty .* such as \[31\]$"),
    ({"model.projector.encoder_layers": [3, 30]}, 1, r"^model.projector.encoder_layers=\[3, 30\] must .* up to the last, 31:"),
    ({"model.projector.encoder_layers": [3, 31], "train.ctc_weight": 0.1}, 1, r"^train.ctc_weight=0.1 needs one layer and"),
    ({"model.projector.qformer": QFormerConfig(64, n_heads=7), "model.projector.encoder_layers": [31], "data.queries": 64}, 1,
     r"^model.projector.qformer=.* needs numbers above 0 and n_heads a divisor of model.encoder.d_model=1024$"),
    ({"model.projector.conformer": EncoderConfig(conv_kernel=4)}, 1, r"^model.projector.conformer needs a layer, an odd conv_kernel"),
    ({"model.projector.conformer": EncoderConfig(n_layers=1), "model.freeze_params": ["projector"]}, 1,
     r"freezes projector.layers.0.conv.batch_norm.weight but .* set model.projector.conformer.freeze_batch_norm=true$"),
    ({"model.decoder.pattern": "MX*"}, 1, r"^model.decoder.pattern='MX\*' .*\['X'\]"),
    ({"model.freeze_params": ["^decoder\\.", "^llm\\.."]}, 1, r"^model.freeze_params holds '\^llm.*', which matches no .* encoder\."),
    ({"model.freeze_params": ["^decoder\\."], "model.prevent_freeze_params": ["x"]}, 1, r"^model.prevent_freeze_params holds 'x', which m"),
    ({"model.freeze_params": ["decoder["]}, 1, r"^model.freeze_params holds 'decoder\[', which is no regular expression \(unterminated"),
    ({"model.freeze_params": ["encoder", "projector", "decoder"], "model.encoder.freeze_batch_norm": True}, 1, r"freezes every parameter"),
    ({"model.freeze_params": [r"encoder\.layers\.3\."]}, 1, r"^model.freeze_params freezes encoder.layers.3.conv.batch_norm.weight but"),
    ({"model.lora.rank": 4, "model.lora.targets": ["q_proj"]}, 1, r"^model.lora.targets holds 'q_proj', which matches no .* decoder"),
    ({"model.lora.rank": 4, "model.lora.targets": []}, 1, r"^model.lora.targets is empty and model.lora.rank=4; name .* or set"),
    ({"model.lora.rank": 4, "model.lora.ranks": {"encoder": 2}}, 1, r"^model.lora.ranks holds 'encoder', which matches no projection of "),
    ({"model.lora.rank": 4, "model.lora.targets": ["("]}, 1, r"^model.lora.targets holds '\(', which is no regular expression"),
    ({"model.lora.rank": 4, "model.lora.ranks": {"(": 2}}, 1, r"^model.lora.ranks holds '\(', which is no regular expression"),
    ({"model.lora.rank": 4, "model.lora.ranks": {"decoder": 0}}, 1, r"^model.lora.ranks gives 'decoder' the rank 0; choose at least 1$"),
    ({"model.lora.rank": 4, "model.lora.dropout": 1.0}, 1, r"^model.lora.dropout=1.0 drops everything"),
    ({"model.lora.rank": 4, "model.lora.dora": True, "model.decoder.pattern": "E"}, 1,
     r"^model.lora.dora=True cannot be had for routed experts, and model.lora.targets matches decoder.layers.0.experts.up"),
    ({"precision": "fp16"}, 1, r"^precision=fp16 needs a loss scaler, which is not here; choose bf16"),
    ({"precision": "16-mixed"}, 1, r"^precision=16-mixed needs a loss scaler"),
    ({"model.decoder.pattern": ""}, 1, r"^model.decoder.pattern=''"),
    ({"model.decoder.n_kv_heads": 3}, 1, r"^model.decoder.n_kv_heads=3 does not divide model.decoder.n_heads=32"),
    ({"model.decoder.mamba_groups": 7}, 1, r"^model.decoder.mamba_groups=7 does not divide"),
    ({"model.decoder.n_group": 5, "model.decoder.top_k": 2}, 1, r"^model.decoder.n_group=5 does not divide"),
    ({"model.decoder.n_experts": 4}, 1, r"^model.decoder.top_k=6 is more than the 4 experts"),
    ({"model.decoder.topk_group": 2}, 1, r"^model.decoder.topk_group=2 is more than model.decoder.n_group=1"),
    ({"model.decoder.n_group": 128, "model.decoder.topk_group": 8}, 1, r"^model.decoder.n_group=128 leaves fewer than the 2 experts"),
    ({"model.decoder.pattern": "M-"}, 1, r"^model.decoder.mlp_ffn=0 but the pattern has a dense MLP"),
    ({"model.decoder.head_dim": 63, "model.decoder.rope_theta": 1e4}, 1, r"^model.decoder.head_dim=63 is odd"),
    ({"model.decoder.rope_fraction": 0.3, "model.decoder.head_dim": 10, "model.decoder.rope_theta": 1e4}, 1,
     r"^model.decoder.rope_fraction=0.3 rotates 3 of the 10 numbers"),
    ({"model.decoder.rope_fraction": 1.5, "model.decoder.rope_theta": 1e4}, 1, r"^model.decoder.rope_fraction=1.5 rotates 192 of the 128"),
    ({"model.decoder.rope_scaling.kind": "longrope", "model.decoder.rope_scaling.short_factors": [1.0] * 64}, 1,
     r"^model.decoder.rope_scaling has 64 short_factors and 0 long_factors; longrope needs 64 of each"),
    ({"model.decoder.bias_update_rate": 0.1, "model.decoder.router_bias": False}, 1,
     r"^model.decoder.bias_update_rate=0.1 moves .*router_bias"),
    ({"data.rows": []}, 1, r"^data.rows is empty"),
    ({"data.rows": [RowSize(100, 90, 4, 90, 20)]}, 1, r"^data.rows\[0\].utterance_frames=90 does not fit a row of 100 tokens and 90"),
    ({"data.rows": [RowSize(90, 100, 4, 90, 20)]}, 1, r"^data.rows\[0\].utterance_frames=90 does not fit a row of 90 tokens and 100"),
    ({"data.rows": [RowSize(100, 90, 0, 40, 20)]}, 1, r"^data.rows\[0\].utterances=0 is too small"),
    ({"data.rows": [RowSize(200, 90, 4, 40, 20), RowSize(100, 90, 4, 40, 20)]}, 1, r"^data.rows has sizes .* smallest first$"),
])
def test_rules(changes: dict[str, object], world: int, pattern: str | None) -> None:
    cfg = sound()
    for key, new in changes.items():
        put(cfg, key, new)
    if pattern is None:
        assert check(cfg, world) == []
        return
    (sentence,) = check(cfg, world)
    assert re.search(pattern, sentence), sentence


def test_deepep_where_it_is_installed() -> None:
    cfg = sound()
    cfg.parallel.ep, cfg.parallel.ep_dispatch = 2, "deepep"
    assert validate(cfg, Environment(2, "", deep_ep=True)) == []
    cfg.parallel.ep = cfg.model.decoder.n_experts = 12
    cfg.precision = "fp32"
    wrong_dtype, wrong_ranks = validate(cfg, Environment(12, "", deep_ep=True))
    assert wrong_dtype == "parallel.ep_dispatch=deepep sends bf16 alone and precision=fp32; choose bf16, or alltoall"
    assert wrong_ranks.startswith("parallel.ep_dispatch=deepep is not made for parallel.ep=12; choose one of 2, 4, 8, 16, ")


def test_cuda_graphs_need_a_gpu_and_work_without_the_host() -> None:
    cfg = sound()
    cfg.compile.cuda_graph = True
    said = "compile.cuda_graph=true cannot record"
    assert validate(cfg, Environment(1, "")) == []
    assert validate(cfg, Environment(1, "", gpu=False)) == [
        "compile.cuda_graph=true records what an NVIDIA GPU does, and there is none; leave it out"]
    cfg.parallel.ep, cfg.parallel.ep_dispatch = 2, "alltoall"
    assert validate(cfg, Environment(2, "")) == [f"{said} parallel.ep_dispatch=alltoall, which waits for counts; choose allgather"]
    cfg.parallel.ep_dispatch, cfg.parallel.offload = "allgather", "optimizer"
    assert validate(cfg, Environment(2, "")) == [f"{said} work of the host and parallel.offload=optimizer has some; leave one out"]
    cfg.parallel.offload = "none"
    assert validate(cfg, Environment(2, "")) == []
    cfg.parallel.pp = 2
    assert validate(cfg, Environment(4, "")) == [f"{said} what parallel.pp=2 sends from stage to stage; leave it out"]


def test_all_violations_at_once() -> None:
    cfg = sound()
    assert cfg.model.encoder is not None
    cfg.precision, cfg.parallel.ep, cfg.model.encoder.conv_kernel = "int3", 8, 4
    assert len(check(cfg, 3)) == 3


def test_every_sentence_has_an_example() -> None:
    sentences = {(file, node.lineno) for file in (str(module.__file__) for module in (values, layout, model))
                 for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Yield)}
    files, reached = {file for file, _ in sentences}, set[tuple[str, int]]()

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return follow

    sys.settrace(follow)
    try:
        said = [broken(example) for rule in RULES for example in rule.examples]
    finally:
        sys.settrace(None)
    assert [len(each) for each in said] == [1] * len(said)
    assert sorted(sentences - reached) == []


def test_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [rule.check.__name__ for rule in RULES]
    assert "  parallel.dp_replicate=3 does not divide the 4 data-parallel ranks; choose a divisor of 4" in lines
    assert main([]) == 2
