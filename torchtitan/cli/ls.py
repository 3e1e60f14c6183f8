"""`torchtitan ls`: list modules, their configurations, and the sizes of their models."""

import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.registry import built_in_modules, list_module, modules_on_disk
from torchtitan.tools.parser import Parser

SIZES = Path(__file__).parents[1] / "assets/model_sizes.json"
"""Numbers of parameters by built-in family and flavor, written by `python -m tests.model_sizes`:
building the models to count their parameters takes 15 s."""


def ls(args: Sequence[str]) -> int:
    """Print modules with their configurations and flavors, and return the exit code. All are listed
    from their sources, without importing them; only built-in models have sizes."""
    description = "List modules, their configurations (--config) and their model flavors."
    Parser(prog="torchtitan ls", description=description).parse_args(args)
    sizes: dict[str, dict[str, int]] = json.loads(SIZES.read_text())
    built_in = built_in_modules()
    for name, folder in modules_on_disk().items():
        listing = list_module(name, folder)
        print(name)
        print(f"  configs: {', '.join(listing.configs) or 'none (models for another module)'}")
        if listing.flavors:
            known = sizes.get(name, {}) if name in built_in else {}
            flavors = [with_size(flavor, known.get(flavor)) for flavor in listing.flavors]
            print(f"  flavors: {', '.join(flavors)}")
    print("Every language model also has the configurations of auto, with --hf_assets_path DIR.")
    return 0


def with_size(flavor: str, n_parameters: int | None) -> str:
    """Return the flavor's name with its rounded number of parameters, if that is known."""
    if n_parameters is None:
        return flavor
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
    unit, letter = next((one for one in units if n_parameters >= 0.9995 * one[0]), units[-1])
    return f"{flavor} ({n_parameters / unit:.3g} {letter})"
