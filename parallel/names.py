"""What the levels of sharding are called elsewhere: the one place where other systems' names become ours."""

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


def zero_stage(value: int | str) -> int:
    """0 nothing is sharded, 1 moments and master parameters, 2 gradients too, 3 the weights that compute too.

    Raises ValueError for a name that no system uses.
    """
    stage = ZERO_STAGES.get(str(value), value)
    if stage not in STAGES:
        raise ValueError(f"{value} is no zero stage; choose 0, 1, 2, 3 or one of {', '.join(ZERO_STAGES)}")
    return int(stage)
