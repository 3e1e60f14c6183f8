"""`--parallelism.auto`: choose a run's layout before its processes start."""

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import yaml

from torchtitan.foresight.device_choice import device_named, device_of_gpu
from torchtitan.foresight.devices import DEVICES, Device
from torchtitan.foresight.planning import LAYOUT, plan
from torchtitan.tools.device import total_memory
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer


def layout_words(config: Trainer.Config, world_size: int, devices_per_host: int) -> list[str]:
    """Return the options of the best layout, in the order of the command line; a run that resumes with the same number
    of processes keeps its layout. Without `--training.global_batch_size`, the global batch is local_batch_size times
    the number of processes. Raise `UserError` if no layout fits, or the device is not in the table."""
    words = _layout_of_earlier_run(config, world_size)
    if words is None:
        if config.training.global_batch_size == -1:
            config.training.global_batch_size = config.training.local_batch_size * world_size
        device = _own_device(world_size, devices_per_host)
        best = plan(config, world_size, device, devices_per_host=devices_per_host, best=1).options[0]
        logger.info(
            f"--parallelism.auto: {best.name}; predicted {best.prediction.tokens_per_second:,.0f} tokens/s per device, "
            f"{best.prediction.memory_gib:.1f} GiB"
        )
        words = best.words
    return [*words, "--parallelism.auto", "false"]


def _layout_of_earlier_run(config: Trainer.Config, world_size: int) -> list[str] | None:
    path = Path(config.dump_folder) / "config.yaml"
    start = config.checkpoint.find_start(config.dump_folder)
    if start is None or not start.resumes or not path.is_file():
        return None
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    has_same_batch = config.training.global_batch_size in (-1, document["training"]["global_batch_size"])
    if prod(document["parallelism"][name] for name in LAYOUT[:5]) != world_size or not has_same_batch:
        return None
    chosen = {"training": ("local_batch_size", "global_batch_size"), "activation_checkpoint": ("mode",)}
    options = {f"--{section}.{name}": document[section][name] for section, names in chosen.items() for name in names}
    options |= {f"--parallelism.{name}": document["parallelism"][name] for name in LAYOUT}
    logger.info("--parallelism.auto: the run resumes with its layout (%s)", path)
    return [str(word) for pair in options.items() for word in pair]


def _own_device(world_size: int, devices_per_host: int) -> Device:
    import torch

    if not torch.cuda.is_available():
        if world_size > devices_per_host:
            raise UserError(
                "--parallelism.auto measures a CPU, and could choose differently on each of several hosts; use the "
                "options that `torchtitan plan --device cpu` prints"
            )
        return device_named("cpu", world_size)
    name = torch.cuda.get_device_name()
    found = device_of_gpu(name)
    if found is None:
        raise UserError(
            f"--parallelism.auto does not know '{name}' (it knows: {', '.join(DEVICES)}); use `torchtitan plan "
            "--device_file`, and the options that it prints"
        )
    return dataclasses.replace(found, memory_gib=total_memory() / 2**30)
