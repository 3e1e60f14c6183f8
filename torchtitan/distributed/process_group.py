"""Start and end of the process group, and the few collectives that the loop needs."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config import CommConfig


def world_size() -> int:
    """Processes in this run, as the launcher said; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(device_type: str, comm: CommConfig) -> torch.device:
    """Join the other processes, if there are any, and return this process's device."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size() > 1:
        # gloo beside nccl: object broadcasts and asynchronous checkpoints communicate from the host.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=comm.timeout_seconds))
    return device


def destroy_process_group() -> None:
    """Leave together: a rank that tears down early can abort another that is still in a collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """`values` summed element by element over all processes, in place; nothing to do in a single one."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def on_all_ranks(condition: bool) -> bool:
    """Whether `condition` holds in every process."""
    return all(gather_objects(condition))


def gather_objects(value: Any) -> list[Any]:
    """`value` of every process, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
