"""Options that streams of fine-tuning data do not have."""

import dataclasses
from typing import Any

from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.data.pretraining.order import check_cycle
from torchtitan.tools.errors import UserError

NOT_STREAMED = ("encoding_processes", "pack_chunk", "weight_schedule", "max_epochs")
"""Options that need all rows, or that a block of a stream replaces."""


def check_stream(config: Any) -> None:
    """Raise `UserError` for options of a `PlannedDataLoader.Config` that streams do not have."""
    name = "--dataloader.stream all"
    if type(config.sampler) is not ShuffleSampler.Config:
        raise UserError(
            f"{name} reads rows in the order of the stream, without a sampler that chooses them; "
            "use the sampler `shuffle`, or set --dataloader.stream none"
        )
    defaults = {one.name: one for one in dataclasses.fields(config)}
    for option in filter(defaults.__contains__, NOT_STREAMED):
        value, default = getattr(config, option), defaults[option].default
        if value != (default if default is not dataclasses.MISSING else []):
            raise UserError(
                f"--dataloader.{option} {value} cannot be combined with {name}; remove one"
            )
    if weights := getattr(config, "weights", []):
        check_cycle(weights)
