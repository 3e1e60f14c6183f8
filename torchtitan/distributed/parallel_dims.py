"""`ParallelDims`: the degrees of parallelism of a run, checked, and the device meshes made of them."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config import ParallelismConfig
from torchtitan.tools.errors import UserError


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks each kind of parallelism spans; together they span all ranks.

    Build it with `from_config`, which checks the degrees.
    """

    world_size: int
    dp_replicate: int
    dp_shard: int

    @classmethod
    def from_config(cls, config: ParallelismConfig, world_size: int) -> "ParallelDims":
        """Resolve `-1` and check that the degrees multiply to `world_size`.

        Raises:
            UserError: if they do not.
        """
        replicate, shard = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
        if replicate < 1:
            raise UserError(f"--parallelism.data_parallel_replicate_degree is {replicate}, and must be at least 1")
        if shard == -1:
            shard = max(1, world_size // replicate)
        if shard < 1:
            raise UserError(f"--parallelism.data_parallel_shard_degree is {shard}, and must be at least 1, or -1")
        if replicate * shard != world_size:
            raise UserError(
                f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} = "
                f"{replicate * shard} is not the number of processes, {world_size}"
            )
        return cls(world_size=world_size, dp_replicate=replicate, dp_shard=shard)

    @property
    def dp_degree(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which share of the data this rank sees, from 0 to `dp_degree` - 1."""
        return dist.get_rank() if self.world_size > 1 else 0

    def build_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of the data-parallel dimensions that are larger than 1; None in a single process.

        FSDP gives `("dp_shard",)`, DDP `("dp_replicate",)`, HSDP `("dp_replicate", "dp_shard")`.
        """
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        used = {name: size for name, size in sizes.items() if size > 1}
        if not used:
            return None
        return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
