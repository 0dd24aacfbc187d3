"""The one truth about ranks, sizes and groups.

Two views of the same ranks: `dense` (dp_shard) for everything but experts, `experts` (ep_shard, ep) for expert weights.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """Sizes, this process's place, and the device meshes."""

    world: int
    rank: int
    ep: int
    device: torch.device
    dense: DeviceMesh  # ("dp_shard",)
    experts: DeviceMesh  # ("ep_shard", "ep")

    @property
    def dp(self) -> int:
        """Number of ranks that read different data."""
        return self.world

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """Ranks among which tokens travel to their experts; None where each rank holds all experts."""
        return self.experts.get_group("ep") if self.ep > 1 else None


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
    dist.destroy_process_group()


def make_mesh(cfg: ParallelConfig, device: torch.device) -> Mesh:
    """Device meshes for the initialised world; the sizes were checked by parallel.validate."""
    world = dist.get_world_size()
    dense = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    experts = init_device_mesh(device.type, (world // cfg.ep, cfg.ep), mesh_dim_names=("ep_shard", "ep"))
    return Mesh(world, dist.get_rank(), cfg.ep, device, dense, experts)
