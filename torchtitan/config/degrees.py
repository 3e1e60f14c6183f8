"""Resolution of the degrees of parallelism for a number of processes."""

from collections.abc import Mapping
from math import prod

from torchtitan.config.sections import ParallelismConfig, TrainingConfig
from torchtitan.tools.errors import UserError, require


def resolve_degrees(config: ParallelismConfig, world_size: int) -> dict[str, int]:
    """Return the degrees whose product is the number of processes by their options, with `-1`
    resolved. Raise `UserError` if they do not multiply to `world_size`, or the degrees of experts
    do not fit them."""
    config.validate()
    degrees = {
        "data_parallel_shard_degree": config.data_parallel_shard_degree,
        "data_parallel_replicate_degree": config.data_parallel_replicate_degree,
        "context_parallel_degree": config.context_parallel_degree,
        "tensor_parallel_degree": config.tensor_parallel_degree,
        "pipeline_parallel_degree": config.pipeline_parallel_degree,
    }
    if config.data_parallel_shard_degree == -1:
        others = {
            name: degree for name, degree in degrees.items() if name != "data_parallel_shard_degree"
        }
        if world_size % prod(others.values()):
            divide = "does" if sum(degree > 1 for degree in others.values()) == 1 else "do"
            raise UserError(
                f"{product_of(others)} {divide} not divide the number of processes, {world_size} "
                "(NGPU)"
            )
        degrees["data_parallel_shard_degree"] = world_size // prod(others.values())
    if prod(degrees.values()) != world_size:
        raise UserError(
            f"{product_of(degrees)} is not the number of processes, {world_size} (NGPU)"
        )
    _check_experts(config, degrees)
    return degrees


def check_training(
    training: TrainingConfig, parallelism: ParallelismConfig, degrees: Mapping[str, int]
) -> None:
    """Raise `UserError` for options of training that the degrees of `resolve_degrees` do not
    allow."""
    if training.seq_len_schedule:
        parallelism.require_one(
            "pipeline", user="--training.seq_len_schedule, since its buffers have one size"
        )
    for name in ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"):
        is_set = getattr(parallelism, name) is not None
        if is_set and degrees["pipeline_parallel_degree"] == 1:
            raise UserError(
                f"--parallelism.{name} needs --parallelism.pipeline_parallel_degree above 1"
            )
    shard = degrees["data_parallel_shard_degree"]
    training.resolve_global_batch_size(shard * degrees["data_parallel_replicate_degree"])
    if training.enable_cpu_offload:
        require_fsdp("--training.enable_cpu_offload", shard * degrees["context_parallel_degree"])


def require_fsdp(option: str, shards: int) -> None:
    """Raise `UserError` for an option that needs several ranks to share the weights, if `shards`,
    the ranks that do so, are one."""
    if shards == 1:
        raise UserError(
            f"{option} is a part of FSDP, and needs --parallelism.data_parallel_shard_degree (or "
            "context_parallel_degree) above 1"
        )


def _check_experts(config: ParallelismConfig, degrees: Mapping[str, int]) -> None:
    tp, etp = config.tensor_parallel_degree, config.expert_tensor_parallel_degree
    option, allowed = "--parallelism.expert_tensor_parallel_degree", "1 or "
    require(etp in (1, tp), option, etp, f"{allowed}--parallelism.tensor_parallel_degree {tp}")
    inner = ["data_parallel_shard_degree", "context_parallel_degree"]
    if etp == 1:
        inner.append("tensor_parallel_degree")
    ranks = {name: degrees[name] for name in degrees if name in inner}
    if prod(ranks.values()) % config.expert_parallel_degree:
        raise UserError(
            f"--parallelism.expert_parallel_degree {config.expert_parallel_degree} does not divide "
            f"{product_of(ranks)}"
        )


def product_of(degrees: Mapping[str, int]) -> str:
    """Return the degrees as options, with their product if several are above 1."""
    shown = {name: degree for name, degree in degrees.items() if degree > 1} or degrees
    factors = " x ".join(f"--parallelism.{name} {degree}" for name, degree in shown.items())
    return f"{factors} = {prod(shown.values())}" if len(shown) > 1 else factors
