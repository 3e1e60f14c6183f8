"""`torchtitan plan`: find the best layouts of a run on given devices, before it starts."""

import argparse
import dataclasses
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.model_options import run_command
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger, presentable
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.foresight.capacity import Capacity
    from torchtitan.foresight.planning import Plan
    from torchtitan.foresight.prediction import Prediction


def plan(args: Sequence[str]) -> int:
    """Print the best layouts of a configuration, and return the exit code."""
    parser = Parser(
        prog="torchtitan plan",
        allow_abbrev=False,
        description="Find the best layout of a run: degrees of parallelism, schedule, local batch "
        "and activation "
        "checkpointing, by predicted tokens per second.",
        epilog="Also accepts the options of `torchtitan train`: --module, --config, --config_file, "
        "--compile.enable …",
    )
    parser.add_argument("--devices", type=int, required=True, help="devices of the run")
    parser.add_argument(
        "--device",
        default="h100",
        help="a device of the table in docs/foresight.md, such as h100, or cpu: this machine, "
        "measured",
    )
    parser.add_argument(
        "--device_file",
        type=Path,
        help="YAML file that describes another device (docs/foresight.md)",
    )
    parser.add_argument(
        "--devices_per_host",
        type=int,
        help="devices that fast links connect (default 8; 72 of gb200)",
    )
    parser.add_argument("--seq_len", type=int, help="tokens of a window (--training.seq_len)")
    parser.add_argument(
        "--global_batch_size", type=int, help="windows of a step (--training.global_batch_size)"
    )
    parser.add_argument("--best", type=int, default=5, help="layouts to print (default 5)")
    parser.add_argument(
        "--largest",
        action="store_true",
        help="also find the largest local batch, and the longest window, that fit with the best "
        "degrees of parallelism",
    )
    parser.add_argument(
        "--apply", type=Path, metavar="FILE", help="write the best configuration, for --config_file"
    )
    options, words = parser.parse_known_args(args)
    for name in ("seq_len", "global_batch_size"):
        if (value := getattr(options, name)) is not None:
            words.append(f"--training.{name}={value}")
    return run_command("plan", lambda: _plan(options, words))


def _plan(options: argparse.Namespace, words: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from torchtitan.config.manager import ConfigManager
    from torchtitan.config.sections import require_at_least
    from torchtitan.foresight import planning
    from torchtitan.foresight.capacity import capacities
    from torchtitan.foresight.devices import device_in_file, device_named

    n_devices = options.devices
    path = options.apply
    for name in ("devices", "devices_per_host", "best", "seq_len", "global_batch_size"):
        require_at_least(1, **{name: getattr(options, name)})
    if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(
            f"--apply '{path}' cannot be written: name a file in an existing folder that you may "
            "write to"
        )
    device = (
        device_in_file(options.device_file)
        if options.device_file
        else device_named(options.device, n_devices)
    )
    per_host = options.devices_per_host or device.devices_per_host
    _refuse_mesh(words, planning.MESH)
    resolved = ConfigManager("torchtitan plan").parse_args(words)
    for log in (logger, logging.getLogger("torch.distributed.tensor")):
        log.setLevel(logging.ERROR)  # the dry runs of many layouts would repeat themselves
    with Console(stderr=True).status(
        Text(presentable(f"comparing layouts of {n_devices} x {device.name}"))
    ):
        found = planning.plan(
            resolved.config, n_devices, device, devices_per_host=per_host, best=options.best
        )
    _print(found, f"{n_devices} x {device.name}")
    hosts, best = -(-n_devices // per_host), found.options[0]
    words += planning.option_words(resolved.config, best.layout.config.to_dict())
    variables = f"NNODES={hosts} NGPU={per_host}" if hosts > 1 else f"NGPU={n_devices}"
    print(presentable(f"\nBest: {variables} torchtitan train {shlex.join(words)}"))
    if path:
        dataclasses.replace(resolved, config=best.layout.config).save(path)
        print(presentable(f"Written: {path} (torchtitan train --config_file {path})"))
    if options.largest:
        with Console(stderr=True).status("finding the largest batch"):
            largest = capacities(best.layout, device)
        _print_capacities(largest, best)


def _refuse_mesh(words: Sequence[str], mesh: Sequence[str]) -> None:
    """Raise `UserError` for a degree on the command line, which the best layout would replace."""
    for word in words:
        name = word.partition("=")[0]
        if name.removeprefix("--") in mesh:
            raise UserError(
                f"{name} is chosen by torchtitan plan; leave it out, or predict the time of one "
                "layout by a dry run: COMM_MODE=fake_backend (docs/dry_run.md)"
            )


def _print(found: "Plan", title: str) -> None:
    from torchtitan.tools.tables import open_console, print_table

    rows = []
    for index, one in enumerate(found.options):
        numbers = [
            f"{one.seconds:,.3g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.mfu:.1%}",
            f"{one.memory_gib:.1f}",
        ]
        rows.append(
            [str(index + 1), str(one.layout), *numbers, found.reason(index) if index else ""]
        )
    numeric = ["step (s)", found.options[0].rate_unit, "MFU", "GiB"]
    print_table(
        open_console(),
        title,
        ["", "layout", *numeric, "why not the first"],
        rows,
        numbers=["", *numeric],
    )
    print(f"{found.n_compared:,} layouts compared; {found.n_too_large:,} need too much memory.")


def _print_capacities(found: "Sequence[Capacity]", best: "Prediction") -> None:
    from torchtitan.foresight.capacity import MOST_SEQUENCES
    from torchtitan.tools.tables import open_console, print_table

    config = best.layout.config
    batch = f"local batch of windows of {config.training.seq_lens[-1]:,}"
    window = "tokens of one window"
    more = {MOST_SEQUENCES: " or more"}
    whole = {config.model_spec.model.max_seq_len: " (the context)"}
    rows = [
        [
            one.mode,
            f"{one.sequences:,}{more.get(one.sequences, '')}",
            f"{one.window:,}{whole.get(one.window, '')}",
        ]
        for one in found
    ]
    print_table(
        open_console(),
        f"the largest that fit on each {best.device.name} with {best.layout.dims}",
        ["checkpointing", batch, window],
        rows,
        numbers=[batch, window],
    )
