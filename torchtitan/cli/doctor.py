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
    from torchtitan.foresight.device_choice import device_of_gpu

    known = device_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None:
        return {}
    return {
        PRODUCTS: known.bfloat16_flops * known.product_efficiency,
        LINKS: known.link_bandwidth * known.link_efficiency,
        NETWORK: known.network_bandwidth * known.link_efficiency,
    }


def _print(ranks: "Sequence[RankHealth]", device: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from torchtitan.distributed.health import ALL_REDUCE, DISK, FREE, PRODUCTS, SHARED

    software = ", ".join(f"{name} {version}" for name, version in ranks[0].software.items())
    names = ("rank", "products (TFLOP/s)", "links (GB/s)", "disk (MB/s)", "free (GiB)", "/dev/shm (GiB)")
    columns = [Column(name, justify="right") for name in names]
    table = Table("host", *columns, title=f"{device}; {software}", title_justify="left")
    for one in ranks:
        speeds = one.bandwidths.values()
        links = f"{min(speeds) / 1e9:.2f} to {max(speeds) / 1e9:.2f}" if speeds else ""
        of_host = [(DISK, 1e6), (FREE, 1), (SHARED, 1)] if FREE in one.facts else []
        numbers = [f"{one.facts[name] / unit:,.1f}" for name, unit in of_host]
        table.add_row(one.host, str(one.rank), f"{one.facts[PRODUCTS] / 1e12:,.2f}", links, *numbers)
    console = Console(width=160)
    console.print(table)
    if len(ranks) > 1:
        speed = statistics.median(one.facts[ALL_REDUCE] for one in ranks)
        console.print(f"All-reduce over all ranks: {speed / 1e9:.2f} GB/s sent by each")
