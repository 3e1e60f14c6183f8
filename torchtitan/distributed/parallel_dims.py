"""`ParallelDims`: the validated degrees of parallelism of a run, and its device mesh."""

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import ParallelismConfig
from torchtitan.config.degrees import product_of, require_fsdp, resolve_degrees
from torchtitan.distributed.context_parallel import LoadBalancer, SequenceShards
from torchtitan.distributed.process_group import flatten_mesh, new_mesh, split_mesh
from torchtitan.protocols import BaseModel
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import concatenate_meshes

DEGREES = {
    "data_parallel_shard_degree": "dp_shard",
    "data_parallel_replicate_degree": "dp_replicate",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
}
"""Option of a degree → its field in `ParallelDims`."""

_ALL_DEGREES = {
    **DEGREES,
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
}
"""Also of the degrees that divide ranks of others."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism, whose product is the number of ranks. Build it with `from_config`,
    which checks them. Tensor parallelism, which communicates most, is innermost, then context, data
    (sharded, replicated) and pipeline."""

    world_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    cp_load_balancer: LoadBalancer = "headtail"
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        assert prod(self.sizes.values()) == self.world_size

    @classmethod
    def from_config(cls, config: ParallelismConfig, world_size: int) -> "ParallelDims":
        """Resolve `-1`. Raise `UserError` as `resolve_degrees`."""
        degrees = resolve_degrees(config, world_size)
        return cls(
            world_size=world_size,
            cp_load_balancer=config.context_parallel_load_balancer,
            ep=config.expert_parallel_degree,
            etp=config.expert_tensor_parallel_degree,
            **{field: degrees[name] for name, field in DEGREES.items()},
        )

    def require_fsdp(self, option: str) -> None:
        """Raise `UserError` for an option that needs several ranks to share the weights."""
        require_fsdp(option, self.shards)

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that multiply to the number of ranks, by option."""
        return {name: getattr(self, field) for name, field in DEGREES.items()}

    def check_fits(self, model: BaseModel.Config, seq_len: int) -> None:
        """Raise `UserError` for a degree that the model does not support, or for the first size of
        the model or the sequence that cannot be split."""
        family = type(model).__qualname__.removesuffix(".Config")
        degrees = {name: getattr(self, field) for name, field in _ALL_DEGREES.items()}
        # A class of transformers answers by trials, which one process does not need.
        is_divided = any(degree > 1 for degree in degrees.values())
        reasons = model.unsupported_parallelisms() if is_divided else {}
        for name, reason in reasons.items():
            if degrees[name] > 1:
                raise UserError(
                    f"--parallelism.{name} {degrees[name]} must be 1 for {family}, because {reason}"
                )
        for name, size in model.tensor_parallel_sizes.items():
            if size % self.tp:
                raise UserError(
                    f"--parallelism.tensor_parallel_degree {self.tp} does not divide "
                    f"--model.{name} {size}"
                )
        for name, size in model.context_parallel_sizes.items() if self.cp > 1 else ():
            if size % (self.tp * self.cp):
                product = product_of(
                    {"tensor_parallel_degree": self.tp, "context_parallel_degree": self.cp}
                )
                raise UserError(f"{product} does not divide --model.{name} {size}")
        if model.vocab_size and model.vocab_size < self.tp:
            raise UserError(
                f"--parallelism.tensor_parallel_degree {self.tp} is above --model.vocab_size "
                f"{model.vocab_size}"
            )
        experts = {"expert_parallel_degree": self.ep, "expert_tensor_parallel_degree": self.etp}
        if prod(experts.values()) > 1:
            expert_sizes = model.expert_parallel_sizes
            if not expert_sizes:
                raise UserError(
                    f"{product_of(experts)} divides routed experts, and {family} has none; set 1"
                )
            for (option, degree), (name, size) in zip(
                experts.items(), expert_sizes.items(), strict=False
            ):
                if size % degree:
                    raise UserError(
                        f"--parallelism.{option} {degree} does not divide --model.{name} {size}"
                    )
        if model.divides_samples:  # by `OwnTokens`, at the first batch
            return
        pieces = (
            self.tp * self.cp * (2 if self.cp > 1 and self.cp_load_balancer == "headtail" else 1)
        )
        if seq_len % pieces:
            product = product_of(
                {"tensor_parallel_degree": self.tp, "context_parallel_degree": self.cp}
            )
            doubled = (
                f", doubled by the load balancer `headtail`: {pieces},"
                if pieces > self.tp * self.cp
                else ""
            )
            raise UserError(f"{product}{doubled} does not divide --training.seq_len {seq_len}")

    def __str__(self) -> str:
        """Return the degrees above 1, outermost first: `pp 2 x tp 2`; `one process` if all are
        1."""
        return (
            " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1)
            or "one process"
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh dimension → its number of ranks, outermost first."""
        return {
            name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        }

    def coordinate(self, dimension: str) -> int:
        """Return this rank's position in a dimension of the mesh."""
        rank = dist.get_rank() if self.world_size > 1 else 0
        return self.coordinates(rank)[dimension]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position in each dimension of the mesh."""
        coordinates = {}
        for name, size in reversed(self.sizes.items()):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    @property
    def shards(self) -> int:
        """Number of ranks that shard one copy of the weights."""
        return self.dp_shard * self.cp

    @property
    def dp_degree(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Index of this rank's share of the samples, from 0 to `dp_degree` - 1."""
        return self.coordinate("dp_replicate") * self.dp_shard + self.coordinate("dp_shard")

    @property
    def gradient_degree(self) -> int:
        """Number of ranks with the same weights and different tokens; gradients are averaged over
        them."""
        return self.dp_degree * self.cp

    @property
    def is_batch_leader(self) -> bool:
        """True on one of the ranks with the same samples."""
        return all(self.coordinate(name) == 0 for name in ("pp", "cp", "tp"))

    @property
    def is_tensor_leader(self) -> bool:
        """True on one rank of a tensor-parallel group, whose ranks all compute the same loss."""
        return self.coordinate("tp") == 0

    @property
    def tensor_leader(self) -> int:
        """The first rank of this one's tensor-parallel group, whose ranks have the same samples."""
        return (dist.get_rank() if self.world_size > 1 else 0) - self.coordinate("tp")

    def divides_batches(self, model: BaseModel.Config) -> bool:
        """True if context-parallel ranks get their tokens of each batch: not if the model divides
        the tokens of whole samples."""
        return self.cp > 1 and not model.divides_samples

    @property
    def sequence_shards(self) -> SequenceShards:
        """Assignment of a window's tokens to context-parallel ranks."""
        return SequenceShards(self.cp, self.cp_load_balancer)

    def build_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the mesh ("pp", "dp_replicate", "fsdp", "tp") with dimensions of size 1; None in
        one process. Weights are sharded over "fsdp", including context-parallel ranks, which have
        the same weights and different tokens."""
        if self.world_size == 1:
            return None
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "fsdp": self.shards,
            "tp": self.tp,
        }
        mesh = new_mesh(device_type, sizes)
        if sizes["fsdp"] > 1 and sizes["tp"] > 1:
            flatten_mesh(mesh["fsdp", "tp"])  # lets DTensor sum over both at once
        return mesh

    def context_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the dimension of context parallelism inside "fsdp"."""
        return split_mesh(mesh, "fsdp", (self.dp_shard, self.cp), ("dp_shard", "cp"))["cp"]

    def expert_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """Return the mesh of routed experts: "dp_replicate", "efsdp", "ep", and "tp" if it splits
        experts; if not, its ranks are among the ranks of "efsdp" and "ep". None: experts are not
        divided among ranks."""
        if mesh is None or self.ep == self.etp == 1:
            return None
        if self.etp == self.tp:
            experts = split_mesh(mesh, "fsdp", (self.shards // self.ep, self.ep), ("efsdp", "ep"))
        else:
            ranks = flatten_mesh(mesh["fsdp", "tp"])
            inner = split_mesh(ranks, 0, (ranks.size() // self.ep, self.ep), ("efsdp", "ep"))
            experts = concatenate_meshes([mesh["dp_replicate"], inner])
        flatten_mesh(experts["efsdp", "ep"])  # as in `build_mesh`
        return experts
