"""`torchtitan ls`: list modules, their configurations, and the sizes of their models."""

import gc
from collections.abc import Sequence
from contextlib import suppress

from torchtitan.config.registry import built_in_modules, list_module, modules_on_disk
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import without_logs
from torchtitan.tools.parser import Parser


def ls(args: Sequence[str]) -> int:
    """Print modules with their configurations and flavors, and return the exit code. Modules of other packages are
    listed from their sources, without importing them, so without the sizes of their models."""
    description = "List modules, their configurations (--config) and their model flavors."
    Parser(prog="torchtitan ls", description=description).parse_args(args)
    built_in = built_in_modules()
    for name, folder in modules_on_disk().items():
        listing = list_module(name, folder)
        print(name)
        print(f"  configs: {', '.join(listing.configs)}")
        if flavors := listing.flavors:
            has_sizes = name in built_in and any(not flavor.startswith("debugmodel") for flavor in flavors)
            with suppress(UserError), without_logs():  # an optional dependency is not installed
                flavors = sizes_of(name) if has_sizes else flavors
            print(f"  flavors: {', '.join(flavors)}")
    print("Every family also has the configurations of auto, with --hf_assets_path DIR.")
    return 0


def sizes_of(family: str) -> list[str]:
    """Return the flavors of a built-in family with their numbers of parameters."""
    import torch

    from torchtitan.config.registry import trusted_module

    gc.freeze()  # otherwise, garbage collection walks through all of torch with each few models
    sizes = []
    package = trusted_module(f"torchtitan.models.{family}")
    assert package is not None, "built-in modules are trusted"
    for flavor, config in package.FLAVORS.items():
        if config.vocab_size is None:
            sizes.append(flavor)
            continue
        with torch.device("meta"):
            sizes.append(f"{flavor} ({_rounded(config.build().num_parameters())})")
    return sizes


def _rounded(n_parameters: int) -> str:
    unit, letter = next((one for one in ((1e12, "T"), (1e9, "B")) if n_parameters >= 0.9995 * one[0]), (1e6, "M"))
    return f"{n_parameters / unit:.3g} {letter}"
