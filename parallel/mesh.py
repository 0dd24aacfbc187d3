"""The one truth about ranks, sizes and groups.

Ranks are numbered row by row through (pp, dp_replicate, dp_shard, cp, tp), and the same ranks through (pp, ep_replicate, ep_shard, ep). pp
is outermost: each stage of the pipeline has ranks, meshes and parameters of its own. A parameter sees the ranks of its stage as
(replicate, shard), one that a model axis splits as (replicate, shard, that axis):

    dense    (dp_replicate, dp_shard cp tp)       a parameter that no axis splits has no copy within a replica, also not over cp and tp
    tensor   (dp_replicate, dp_shard cp, tp)
    experts  (ep_replicate, ep_shard, ep)
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import ParallelConfig
from parallel import deepep
from parallel.names import zero_stage


@dataclass(frozen=True)
class Sizes:
    """Length of every axis, all derived from the configuration and the number of processes."""

    world: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep_replicate: int
    ep_shard: int
    ep: int
    sharded: bool  # False: every rank keeps the whole state (zero stage 0), and dp_shard and ep_shard are 1

    @property
    def stage(self) -> int:
        """Number of processes of a stage of the pipeline."""
        return self.world // self.pp

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of pp cp tp ranks, that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def alike(self) -> int:
        """Number of ranks that share a row."""
        return self.world // self.dp

    @property
    def dense(self) -> tuple[int, int]:
        """(replicate, shard) of a parameter that no model axis splits."""
        return (self.dp_replicate, self.stage // self.dp_replicate) if self.sharded else (self.stage, 1)

    @property
    def tensor(self) -> tuple[int, int, int]:
        """(replicate, shard, tp) of a parameter that is split over tp."""
        return (self.dp_replicate, self.dp_shard * self.cp, self.tp) if self.sharded else (self.dp * self.cp, 1, self.tp)

    @property
    def experts(self) -> tuple[int, int, int]:
        """(replicate, shard, ep) of an expert parameter."""
        return self.ep_replicate, self.ep_shard, self.ep


def sizes(cfg: ParallelConfig, world: int) -> Sizes:
    """The axes of `world` processes; parallel.validate has checked that they divide.

    Experts keep as many replicas as the dense parameters where ep fits into one of them, fewer where it reaches over several.
    """
    stage, sharded = world // cfg.pp, zero_stage(cfg.zero_stage) > 0
    dp = stage // (cfg.cp * cfg.tp)
    dp_replicate = cfg.dp_replicate if sharded else dp
    ep_replicate = math.gcd(dp_replicate, stage // cfg.ep) if sharded else stage // cfg.ep
    return Sizes(world, cfg.pp, dp_replicate, dp // dp_replicate, cfg.cp, cfg.tp,
                 ep_replicate, stage // (cfg.ep * ep_replicate), cfg.ep, sharded)


@dataclass(frozen=True)
class Mesh:
    """This process's place, and the device meshes, all but `tokens` those of its stage of the pipeline."""

    rank: int
    device: torch.device
    sizes: Sizes
    tokens: DeviceMesh  # ("pp", "dp", "cp", "tp"): dp ranks have different rows, cp and tp ranks parts of the same row, pp ranks its layers
    row_group: dist.ProcessGroup | None  # ranks that share a row, in the order of (pp, cp, tp); None where each has its own
    row_hosts: dist.ProcessGroup | None  # the same ranks, for what stays on the host
    parts: DeviceMesh | None  # ("dp", "part"): the ranks of a stage, those of cp and tp as one; None unless there are both
    stage_group: dist.ProcessGroup | None  # all ranks of this stage of the pipeline; None where it is one
    ends_group: dist.ProcessGroup | None  # first and last rank of the pipeline; None on the others, and without a pipeline
    dense: DeviceMesh  # ("replicate", "shard")
    tensor: DeviceMesh | None  # ("replicate", "shard", "tp"); None without tensor parallelism
    experts: DeviceMesh | None  # ("replicate", "shard", "ep"); None without expert parallelism

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.sizes.world

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of pp cp tp ranks, that read different data."""
        return self.sizes.dp

    @property
    def pp_rank(self) -> int:
        """Which place in the pipeline this rank has."""
        return self.tokens.get_local_rank("pp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Ranks through which a row travels; all of them have it, each some of the layers."""
        return self.tokens.get_group("pp")

    @property
    def dp_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.tokens.get_local_rank("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks of a stage that read different data; between them they read each row once."""
        return self.tokens.get_group("dp")

    @property
    def split_group(self) -> dist.ProcessGroup | None:
        """Ranks of a stage that share a row, in the order of (cp, tp); None where each has its own."""
        return self.cp_group or self.tp_group if self.parts is None else self.parts.get_group("part")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Ranks among which the slots of a row are split; None where each has all."""
        return self.tokens.get_group("cp") if self.sizes.cp > 1 else None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Ranks among which the heads and columns of a layer are split; None where each has all."""
        return self.tokens.get_group("tp") if self.sizes.tp > 1 else None

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """Ranks among which tokens travel to their experts; None where each rank holds all experts."""
        return self.experts.get_group("ep") if self.experts is not None else None


def start_processes(device: torch.device) -> None:
    """Initialise torch.distributed from torchrun's environment, or for a single process without any."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def stop_processes() -> None:
    """Leave torch.distributed."""
    deepep.release()
    dist.destroy_process_group()


def make_mesh(cfg: ParallelConfig, device: torch.device) -> Mesh:
    """Device meshes for the initialised world; the sizes were checked by parallel.validate."""
    n = sizes(cfg, dist.get_world_size())

    def view(shape: tuple[int, ...], *names: str) -> DeviceMesh:
        if n.pp == 1:
            return init_device_mesh(device.type, shape, mesh_dim_names=names)
        return init_device_mesh(device.type, (n.pp, *shape), mesh_dim_names=("pp", *names))[names]

    by_stage = torch.arange(n.world).view(n.pp, n.dp, -1)
    rows = by_stage.movedim(0, 1).reshape(n.dp, -1).tolist()
    return Mesh(
        rank=dist.get_rank(), device=device, sizes=n,
        row_group=_group_of(rows) if n.alike > 1 else None, row_hosts=_group_of(rows, "gloo") if n.alike > 1 else None,
        stage_group=None if n.stage == 1 else dist.group.WORLD if n.pp == 1 else _group_of(by_stage.flatten(1).tolist()),
        ends_group=_group_of(by_stage.flatten(1)[[0, -1]].t().tolist()) if n.pp > 1 else None,
        tokens=init_device_mesh(device.type, (n.pp, n.dp, n.cp, n.tp), mesh_dim_names=("pp", "dp", "cp", "tp")),
        parts=view((n.dp, n.cp * n.tp), "dp", "part") if n.cp > 1 and n.tp > 1 else None,
        dense=view(n.dense, "replicate", "shard"),
        tensor=view(n.tensor, "replicate", "shard", "tp") if n.tp > 1 else None,
        experts=view(n.experts, "replicate", "shard", "ep") if n.ep > 1 else None)


def _group_of(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """This rank's one of some groups of ranks, None where it is in none; with gloo one that does not wait for the devices."""
    group, _ = dist.new_subgroups_by_enumeration(groups, backend=backend)
    return group
