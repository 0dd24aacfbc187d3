"""Sizes of the axes, and the names of zero stages in other systems."""

import re
from typing import Any

import pytest
import torch

from configs.schema import ParallelConfig
from parallel.mesh import make_mesh, sizes, start_processes
from parallel.names import KEYS, ZERO_STAGES, zero_stage
from parallel.rules import SOUND, value


@pytest.mark.parametrize(("keys", "world", "dp", "dense", "tensor", "experts"), [
    ({}, 1, 1, (1, 1), (1, 1, 1), (1, 1, 1)),
    ({}, 6, 6, (1, 6), (1, 6, 1), (1, 6, 1)),
    ({"ep": 2}, 4, 4, (1, 4), (1, 4, 1), (1, 2, 2)),
    ({"dp_replicate": 2}, 8, 8, (2, 4), (2, 4, 1), (2, 4, 1)),
    ({"dp_replicate": 2, "ep": 2}, 8, 8, (2, 4), (2, 4, 1), (2, 2, 2)),
    ({"dp_replicate": 2, "ep": 8}, 8, 8, (2, 4), (2, 4, 1), (1, 1, 8)),  # the experts reach over both replicas
    ({"dp_replicate": 4, "ep": 4}, 8, 8, (4, 2), (4, 2, 1), (2, 1, 4)),
    ({"dp_replicate": 4, "ep": 2}, 12, 12, (4, 3), (4, 3, 1), (2, 3, 2)),  # six groups of ep ranks are no four replicas, but two
    ({"cp": 2, "tp": 2}, 8, 2, (1, 8), (1, 4, 2), (1, 8, 1)),
    ({"cp": 2, "tp": 2, "dp_replicate": 2, "ep": 4}, 16, 4, (2, 8), (2, 4, 2), (2, 2, 4)),
    ({"pp": 2}, 8, 4, (1, 4), (1, 4, 1), (1, 4, 1)),
    ({"pp": 2, "dp_replicate": 2, "tp": 2, "ep": 4}, 16, 4, (2, 4), (2, 2, 2), (2, 1, 4)),
    ({"pp": 2, "zero_stage": 0, "cp": 2, "ep": 2}, 8, 2, (4, 1), (4, 1, 1), (2, 1, 2)),
    ({"zero_stage": 0}, 4, 4, (4, 1), (4, 1, 1), (4, 1, 1)),
    ({"zero_stage": "ddp", "ep": 2, "tp": 2}, 8, 4, (8, 1), (4, 1, 2), (4, 1, 2)),
    ({"zero_stage": 1, "cp": 4}, 8, 2, (1, 8), (1, 8, 1), (1, 8, 1)),
])
def test_sizes(keys: dict[str, Any], world: int, dp: int, dense: tuple[int, int], tensor: tuple[int, ...],
               experts: tuple[int, ...]) -> None:
    n = sizes(ParallelConfig(**keys), world)
    assert (n.dp, n.dense, n.tensor, n.experts) == (dp, dense, tensor, experts)


def test_one_process_has_no_groups() -> None:
    start_processes(torch.device("cpu"))
    mesh = make_mesh(ParallelConfig(), torch.device("cpu"))
    assert (mesh.world, mesh.dp, mesh.dp_rank, mesh.pp_rank) == (1, 1, 0, 0)
    assert mesh.cp_group is mesh.tp_group is mesh.ep_group is None


@pytest.mark.parametrize(("name", "stage"), [*ZERO_STAGES.items(), (0, 0), (3, 3)])
def test_names_of_zero_stages(name: str | int, stage: int) -> None:
    assert zero_stage(name) == stage


def test_levels_of_megatron_and_deepspeed_are_in_order() -> None:
    assert [zero_stage(n) for n in ("no_shard", "optim", "optim_grads", "optim_grads_params")] == [0, 1, 2, 3]
    assert [zero_stage(f"deepspeed_stage_{n}") for n in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("value", ["", "zero", "4", 4, -1])
def test_other_names_are_refused(value: str | int) -> None:
    with pytest.raises(ValueError, match="is no zero stage; choose 0, 1, 2, 3 or one of ddp"):
        zero_stage(value)


@pytest.mark.parametrize("key", KEYS)
def test_what_there_is_instead_of_other_systems_keys_is_there(key: str) -> None:
    for named in re.findall(r"(?:\w+\.)+\w+", KEYS[key]):
        value(SOUND, named)
    assert not any(hasattr(part, key) for part in (SOUND.parallel, SOUND.train, SOUND.optimizer, SOUND.model.decoder))
