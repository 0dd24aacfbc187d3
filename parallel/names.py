"""What levels of sharding, offloading and schedules of a pipeline are called elsewhere: the one place where other systems' names become
ours."""

ZERO_STAGES = {
    "ddp": 0,
    "fsdp2": 3,
    "megatron_fsdp": 3,  # its zero_dp_strategy, unless one of the next four is named
    "no_shard": 0,
    "optim": 1,
    "optim_grads": 2,
    "optim_grads_params": 3,
    "deepspeed_stage_0": 0,
    "deepspeed_stage_1": 1,
    "deepspeed_stage_2": 2,
    "deepspeed_stage_3": 3,
}
STAGES = (0, 1, 2, 3)
KEYS = {  # that other systems have and this one has not, with what there is instead
    "strategy": "parallel.zero_stage takes its name",
    "zero_dp_strategy": "parallel.zero_stage takes its levels",
    "dp_size": "it is what parallel.pp, parallel.cp and parallel.tp leave of the number of processes",
    "dp_replicate_size": "set parallel.dp_replicate",
    "pp_size": "set parallel.pp",
    "cp_size": "set parallel.cp",
    "tp_size": "set parallel.tp",
    "ep_size": "set parallel.ep",
    "sequence_parallel": "with parallel.tp tokens are split between layers in any case",
    "defer_fsdp_grad_sync": "set parallel.defer_grad_sync",
    "dispatcher": "set parallel.ep_dispatch",
    "fake_balanced_gate": "set model.decoder.force_balance",
    "sync_batchnorm": "set model.encoder.sync_batch_norm",
    "moe_aux_loss_coeff": "set model.decoder.aux_loss_coeff",
    "router_aux_loss_coef": "set model.decoder.aux_loss_coeff",
    "ignore_router_for_ac": "a choice of experts is never made twice",
    "activation_checkpointing_llm": "set train.activation_checkpointing",
    "activation_checkpointing_perception": "set train.activation_checkpointing_encoder",
    "param_dtype": "precision is what weights travel and layers compute in, optimizer.master_dtype what is updated",
    "output_dtype": "layers give what precision says, and losses are fp32",
    "cast_forward_inputs": "what enters a layer is in precision",
    "cpu_offload": "set parallel.offload",
    "offload_policy": "set parallel.offload",
    "offload_optimizer": "set parallel.offload=optimizer",
    "offload_param": "set parallel.offload=parameters",
    "pp_batch_size": "a step has train.accumulate rows",
    "pp_microbatch_size": "what travels is a packed row, train.accumulate of them a step, and data.rows says how long one is",
    "scale_grads_in_schedule": "the loss is divided once by the labels of all rows, so that no schedule has gradients to scale",
}
OFFLOADS = {
    "none": "none",
    "optimizer": "optimizer",
    "parameters": "parameters",
    "offload_optimizer": "optimizer",  # DeepSpeed, device cpu
    "offload_param": "parameters",  # the same, whose optimizer is then there too
    "CPUOffloadPolicy": "parameters",  # FSDP2
}
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved_1f1b": "interleaved_1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "dfs": "interleaved_1f1b",
    "looped_bfs": "looped_bfs",
    "loopedbfs": "looped_bfs",
    "zero_bubble": "zero_bubble",
    "interleaved_zero_bubble": "zero_bubble",
    "interleavedzerobubble": "zero_bubble",
    "zbv": "zbv",
    "v_schedule": "zbv",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}


def zero_stage(value: int | str) -> int:
    """0 nothing is sharded, 1 moments and master parameters, 2 gradients too, 3 the weights that compute too.

    Raises ValueError for a name that no system uses.
    """
    stage = ZERO_STAGES.get(str(value), value)
    if stage not in STAGES:
        raise ValueError(f"{value} is no zero stage; choose 0, 1, 2, 3 or one of {', '.join(ZERO_STAGES)}")
    return int(stage)


def offloaded(value: str) -> str:
    """Our name of what is kept on the host.

    Raises ValueError for a name that no system uses.
    """
    if value not in OFFLOADS:
        raise ValueError(f"{value} cannot be kept on the host; choose one of {', '.join(OFFLOADS)}")
    return OFFLOADS[value]


def schedule(value: str) -> str:
    """Our name of a pipeline's schedule.

    Raises ValueError for one that no system has.
    """
    name = value.lower()
    if name not in SCHEDULES:
        raise ValueError(f"{value} is no schedule of a pipeline; choose one of {', '.join(dict.fromkeys(SCHEDULES.values()))}")
    return SCHEDULES[name]


def kept_share(policy: str) -> float | None:
    """The number that a policy of activation checkpointing is; None for one with a name."""
    try:
        return float(policy)
    except ValueError:
        return None
