"""`torchtitan doctor`: check the hosts of a run before it starts."""

import os
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.model_options import run_command
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    import torch

    from torchtitan.distributed.health import RankHealth

_SECONDS_UNTIL_FAILURE = 5.0
"""Until then, the processes of sound hosts have ended. If an agent of torchrun failed first, all of them would fail."""


def doctor(args: Sequence[str]) -> int:
    """Check this host, or under torchrun all hosts together. Return 1 if this host is out of line, otherwise 0."""
    parser = Parser(
        prog="torchtitan doctor",
        allow_abbrev=False,
        description="Check the hosts of a run, in seconds: equal versions, speed of matrix products, of links between "
        "ranks and of the dump folder, free space, shared memory, limits, clocks and memory errors.",
        epilog="On several hosts: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
        "node-1:29500 -m torchtitan doctor. The exit code is 1 on hosts that are out of line.",
    )
    parser.add_argument("--dump_folder", type=Path, default="./outputs", help="measured folder (default ./outputs)")
    arguments = parser.parse_args(args)
    return run_command("doctor", lambda: _check(arguments.dump_folder))


def _check(folder: Path) -> int:
    from torchtitan.config import CommConfig
    from torchtitan.distributed.health import findings, measure
    from torchtitan.distributed.process_group import destroy_process_group, init_process_group
    from torchtitan.tools.device import device_description, device_type

    device = init_process_group(device_type(), CommConfig(init_timeout_seconds=60))
    ranks = measure(folder, device)
    found = findings(ranks, _expected_speeds(device))
    destroy_process_group()
    own = [finding for finding in found if finding.host == socket.gethostname()]
    if int(os.environ.get("RANK", "0")) == 0:
        _print(ranks, device_description(device))
        for finding in found:
            print(f"PROBLEM {finding.host}: {finding.message}")
        if not found:
            print(f"{len({one.host for one in ranks})} host(s), {len(ranks)} rank(s): no problem found")
    if own and len(ranks) > 1:
        time.sleep(_SECONDS_UNTIL_FAILURE)
    return 1 if own else 0


def _expected_speeds(device: "torch.device") -> dict[str, float]:
    """Return the speeds of a GPU that the table of devices knows, otherwise none."""
    import torch

    from torchtitan.distributed.health import LINKS, NETWORK, PRODUCTS
    from torchtitan.foresight.devices import device_of_gpu

    known = device_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None:
        return {}
    return {
        PRODUCTS: known.bfloat16_flops * known.product_efficiency / 1e12,
        LINKS: known.link_bandwidth * known.link_efficiency / 1e9,
        NETWORK: known.network_bandwidth * known.link_efficiency / 1e9,
    }


def _print(ranks: "Sequence[RankHealth]", device: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from torchtitan.distributed.health import values_of

    software = ", ".join(f"{name} {version}" for name, version in ranks[0].software.items())
    columns = [Column(name, justify="right") for name in ("least", "median", "most")]
    table = Table("of all ranks", *columns, title=f"{device}; {software}", title_justify="left")
    for name, measured in values_of(ranks).items():
        if values := measured.values():
            shown = (min(values), statistics.median(values), max(values))
            table.add_row(name, *(f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in shown))
    Console(width=160).print(table)
