"""`--parallelism.auto`: choose a run's layout before its processes start."""

import dataclasses
from math import prod
from pathlib import Path

import torch

from torchtitan.config.configurable import leaves
from torchtitan.config.yaml_files import read_config_file
from torchtitan.foresight.devices import Device, own_device
from torchtitan.foresight.planning import MESH, option_words, plan
from torchtitan.tools.device import total_memory
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer


def layout_words(config: Trainer.Config, world_size: int, devices_per_host: int) -> list[str]:
    """Return the options that give a configuration the best layout; a run that resumes with the
    same number of processes keeps its layout. Without `--training.global_batch_size`, the global
    batch is local_batch_size times the number of processes. Raise `UserError` if no layout fits, or
    the device is not in the table."""
    chosen = _layout_of_earlier_run(config, world_size)
    if chosen is None:
        training = config.training
        if training.global_batch_size == -1:
            training = dataclasses.replace(
                training, global_batch_size=training.local_batch_size * world_size
            )
        planned = dataclasses.replace(config, training=training)
        device = _own_device(world_size, devices_per_host)
        found = plan(planned, world_size, device, devices_per_host=devices_per_host, best=1)
        best = found.options[0]
        logger.info(
            f"--parallelism.auto: {best.layout}; predicted {best.tokens_per_second:,.0f} "
            f"{best.rate_unit}, {best.memory_gib:.1f} GiB"
        )
        chosen = best.layout.config.to_dict()
    return [*option_words(config, chosen), "--parallelism.auto=false"]


def _layout_of_earlier_run(config: Trainer.Config, world_size: int) -> dict[str, object] | None:
    path = Path(config.dump_folder) / "config.yaml"
    start = config.checkpoint.find_start(config.dump_folder)
    if start is None or not start.resumes or not path.is_file():
        return None
    document = read_config_file(path, f"'{path}'")
    has_same_batch = config.training.global_batch_size in (
        -1,
        document["training"]["global_batch_size"],
    )
    if prod(leaves(document)[name] for name in MESH) != world_size or not has_same_batch:
        return None
    logger.info("--parallelism.auto: the run resumes with its layout (%s)", path)
    return document


def _own_device(world_size: int, devices_per_host: int) -> Device:
    has_gpu = torch.cuda.is_available()
    if not has_gpu and world_size > devices_per_host:
        raise UserError(
            "--parallelism.auto measures a CPU, and could choose differently on each of "
            "several hosts; use the options that `torchtitan plan --device cpu` prints"
        )
    remedy = (
        "instead of --parallelism.auto, use the options that `torchtitan plan --device_file` prints"
    )
    device = own_device(world_size, remedy)
    return dataclasses.replace(device, memory_gib=total_memory() / 2**30) if has_gpu else device
