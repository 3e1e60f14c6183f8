"""`torchtitan doctor`: check the hosts of a run before it starts."""

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan.cli.model_options import run_command
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser


def doctor(args: Sequence[str]) -> int:
    """Check this host, or under torchrun all hosts together. Return 1 if this host is out of line,
    otherwise 0."""
    parser = Parser(
        prog="torchtitan doctor",
        allow_abbrev=False,
        description="Check the hosts of a run, in seconds: equal versions, speed of matrix "
        "products, of links between "
        "ranks and of the dump folder, free space, shared memory, limits, clocks and memory "
        "errors.",
        epilog="On several hosts: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint "
        "node-1:29500 -m torchtitan doctor. The exit code is 1 on hosts that are out of line.",
    )
    parser.add_argument(
        "--dump_folder", type=Path, default="./outputs", help="measured folder (default ./outputs)"
    )
    arguments = parser.parse_args(args)
    return run_command("doctor", lambda: _check(arguments.dump_folder))


def _check(folder: Path) -> int:
    import torch

    from torchtitan.cli.launch import environment_number
    from torchtitan.config import CommConfig
    from torchtitan.distributed.health import findings, measure
    from torchtitan.distributed.process_group import (
        destroy_process_group,
        init_process_group,
        timeouts_named,
    )
    from torchtitan.tools.device import device_description, device_type

    environment_number("NGPU", default=1, minimum=1)  # a mistake in it, before training finds it
    with timeouts_named(lambda: "doctor"):
        device = init_process_group(device_type(), CommConfig(init_timeout_seconds=60))
        health = measure(folder, device)
        found = findings(
            health,
            _expected_speeds(torch.cuda.get_device_name(device) if device.type == "cuda" else ""),
        )
        destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        software = ", ".join(f"{name} {version}" for name, version in health.software[0].items())
        _print(f"{device_description(device)}; {software}", health.facts)
        for host, message in found:
            print(presentable(f"PROBLEM {host}: {message}"))
        if not found:
            print(f"{len({*health.hosts})} host(s), {len(health.hosts)} rank(s): no problem found")
    is_odd = socket.gethostname() in dict(found)
    if is_odd and len(health.hosts) > 1:
        # Wait until the processes of sound hosts have ended: if a torchrun agent failed first, all
        # would fail.
        time.sleep(5)
    return int(is_odd)


def _expected_speeds(gpu: str) -> dict[str, float]:
    """Return the speeds of a GPU, by its own name, if the table of devices knows it, otherwise
    none."""
    from torchtitan.distributed.health import LINKS, NETWORK, PRODUCTS
    from torchtitan.foresight.devices import device_of_gpu

    if (known := device_of_gpu(gpu)) is None:
        return {}
    return {
        PRODUCTS: known.bfloat16_flops * known.product_efficiency / 1e12,
        LINKS: known.link_bandwidth * known.link_efficiency / 1e9,
        NETWORK: known.network_bandwidth * known.link_efficiency / 1e9,
    }


def _print(title: str, facts: Mapping[str, Mapping[tuple[int, ...], float]]) -> None:
    from torchtitan.tools.tables import open_console, print_table

    rows, numeric = [], ("least", "median", "most")
    for name, measured in facts.items():
        if values := measured.values():
            shown = (min(values), statistics.median(values), max(values))
            rows.append(
                (name, *(f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in shown))
            )
    print_table(open_console(), title, ("of all ranks", *numeric), rows, numbers=numeric)
