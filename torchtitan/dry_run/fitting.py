"""Finds the least recomputation that makes a step fit in GPU memory, for
`--activation_checkpoint.mode auto`."""

import dataclasses
from typing import Any, TypeVar

from torchtitan.components.data import PromptDataLoader
from torchtitan.dry_run.report import reports_of
from torchtitan.tools.device import device_type, total_memory
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

ConfigT = TypeVar("ConfigT", bound=Trainer.Config)

USABLE = 0.95
"""Part of the memory that PyTorch may reserve; the CUDA context and NCCL also take some."""


def with_fitting_checkpoints(config: ConfigT, world_size: int) -> ConfigT:
    """Return `config` with `auto` replaced by a mode: on a GPU, the first of `none`, `selective`
    and `full` that fits in dry runs of all pipeline stages; elsewhere `none`. The result depends
    only on the configuration, the number of ranks and the memory of the GPU. Raise `UserError` if
    the layout does not support the mode."""
    if config.activation_checkpoint.mode != "auto":
        return config
    if device_type() != "cuda":
        return with_mode(config, "none")
    if isinstance(config.dataloader, PromptDataLoader.Config):  # a dry run cannot sample answers
        return with_mode(config, "selective")
    memory, needed = total_memory(), []
    for mode in ("none", "selective"):
        try:
            peak = max(
                report.peak_reserved_bytes
                for report in reports_of(with_mode(config, mode), world_size)
            )
        except UserError:
            raise
        # a step of a subclass may need values, which fake tensors do not have
        except Exception as error:
            reason = in_words(error)
            logger.warning(
                "activation checkpointing: selective, since a dry run cannot run this step (%s)",
                reason,
            )
            return with_mode(config, "selective")
        needed.append(f"{mode} {peak / 2**30:.1f} GiB")
        if peak <= USABLE * memory:
            break
    else:
        mode = "full"
    chosen = with_mode(config, mode)
    chosen.check_layout(world_size)
    logger.info(
        f"activation checkpointing: {mode} (--activation_checkpoint.mode auto; by dry runs, a step "
        f"reserves with {', with '.join(needed)}, and the GPU has {memory / 2**30:.1f} GiB)"
    )
    return chosen


def with_mode(config: ConfigT, mode: Any) -> ConfigT:
    """Return a copy with another mode of activation checkpointing."""
    section = dataclasses.replace(config.activation_checkpoint, mode=mode)
    return dataclasses.replace(config, activation_checkpoint=section)
