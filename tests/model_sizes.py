"""The table torchtitan/assets/model_sizes.json: numbers of parameters (`python -m
tests.model_sizes` writes it)."""

import gc
import json
from types import ModuleType

import torch

from torchtitan.cli.ls import SIZES
from torchtitan.models.families import families_with


def sizes_of(family: ModuleType) -> dict[str, int]:
    """Return the number of parameters of each flavor whose vocabulary is known."""
    gc.freeze()  # otherwise, garbage collection walks through all of torch with each few models
    sizes = {}
    for flavor, config in family.FLAVORS.items():
        if config.vocab_size is not None:
            with torch.device("meta"):
                sizes[flavor] = config.build().num_parameters()
    return sizes


def short_name(family: ModuleType) -> str:
    return family.__name__.rpartition(".")[2]


if __name__ == "__main__":
    table = {short_name(family): sizes_of(family) for family in families_with("hf")}
    SIZES.write_text(json.dumps(table, indent=1) + "\n")
