"""`torchtitan plan`: the best layouts of a run on given devices, before it starts."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger, print_error
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.foresight.planning import Plan


def plan(args: Sequence[str]) -> int:
    """Print the best layouts of a configuration, and return the exit code."""
    parser = Parser(
        prog="torchtitan plan",
        allow_abbrev=False,
        description="Find the best layout of a run: degrees of parallelism, schedule, local batch and activation "
        "checkpointing, by predicted tokens per second.",
        epilog="Other options are those of `torchtitan train`: --module, --config, --config_file, --compile.enable …",
    )
    parser.add_argument("--devices", type=int, required=True, help="devices of the run")
    parser.add_argument("--device", default="h100", help="h100, h100_96gb, h200, b200, or cpu: this machine, measured")
    parser.add_argument("--device_file", help="YAML file that describes another device (docs/foresight.md)")
    parser.add_argument("--devices_per_host", type=int, default=8, help="devices that fast links connect (default 8)")
    parser.add_argument("--seq_len", type=int, help="tokens of a window (--training.seq_len)")
    parser.add_argument("--global_batch_size", type=int, help="windows of a step (--training.global_batch_size)")
    parser.add_argument("--best", type=int, default=5, help="layouts to print (default 5)")
    parser.add_argument("--apply", metavar="FILE", help="write the best layout's configuration, for --config_file")
    arguments, words = parser.parse_known_args(args)
    for name in ("devices", "devices_per_host", "best"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} must be at least 1")
    for name in ("seq_len", "global_batch_size"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--training.{name}", str(value)]
    try:
        return _plan(arguments, words)
    except UserError as error:
        print_error("plan", error)
        return 2


def _plan(arguments: argparse.Namespace, words: list[str]) -> int:
    import dataclasses

    from torchtitan.config.manager import ConfigManager
    from torchtitan.foresight import planning
    from torchtitan.foresight.device_choice import device_in_file, device_named

    if arguments.device_file:
        device = device_in_file(Path(arguments.device_file))
    else:
        device = device_named(arguments.device, arguments.devices)
    resolved = ConfigManager("torchtitan plan").parse_args(words)
    for section in (resolved.config.training, resolved.config.parallelism, resolved.config.activation_checkpoint):
        section.validate()
    per_host = arguments.devices_per_host
    for log in (logger, logging.getLogger("torch.distributed.tensor")):
        log.setLevel(logging.ERROR)  # the dry runs of many layouts would repeat themselves
    found = planning.plan(resolved.config, arguments.devices, device, devices_per_host=per_host, best=arguments.best)
    _print(found)
    print(f"\nBest: {planning.command(words, found.options[0], per_host)}")
    if arguments.apply:
        path = Path(arguments.apply)
        try:
            dataclasses.replace(resolved, config=found.options[0].config).save(path)
        except OSError as error:
            raise UserError(f"--apply '{path}' cannot be written: {error.strerror}") from error
        print(f"Written: {path} (torchtitan train --config_file {path})")
    return 0


def _print(found: "Plan") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.world_size} x {found.device.name}", title_justify="left", title_style="bold")
    for column in ("", "layout", "step (s)", "tokens/s per device", "MFU", "GiB", "why not the first"):
        table.add_column(column, justify="left" if column in ("layout", "why not the first") else "right")
    for index, option in enumerate(found.options):
        one = option.prediction
        numbers = [f"{one.seconds:,.3g}", f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}", f"{one.memory_gib:.1f}"]
        table.add_row(str(index + 1), option.name, *numbers, found.reason(index) if index else "")
    Console(width=200).print(table)
    print(f"{found.n_compared:,} layouts compared; {found.n_too_large:,} need more memory than there is.")
