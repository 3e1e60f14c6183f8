"""`torchtitan ls`: list built-in and installed modules from their sources, without importing them."""

import argparse
from collections.abc import Sequence

from torchtitan.config.registry import list_module, modules_on_disk


def ls(args: Sequence[str]) -> int:
    """Print modules with their configurations and flavors, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchtitan ls", description="List modules, their configurations (--config) and their model flavors."
    )
    parser.parse_args(args)
    for name, folder in modules_on_disk().items():
        listing = list_module(name, folder)
        print(name)
        print(f"  configs: {', '.join(listing.configs)}")
        if listing.flavors:
            print(f"  flavors: {', '.join(listing.flavors)}")
    return 0
