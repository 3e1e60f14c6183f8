"""`torchtitan train`: check the configuration once, then train in this process or start one process
per device."""

import gc
import json
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.launch import Hosts, environment_number, launch
from torchtitan.components.observe.run_files import FORESIGHT
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, of_wrong_path
from torchtitan.tools.logging import check_log_ranks, init_logger, presentable
from torchtitan.tools.process import COMMAND_VARIABLE, usable_cores, use_expandable_segments
from torchtitan.tools.redact import redact
from torchtitan.train import exit_code_of, log_message, run, with_fitting_mode, with_preflight

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

PROGRAM_VARIABLE = "TORCHTITAN_PROGRAM"
"""Environment variable with the user's command if a script calls `torchtitan train`."""

_PROCESSES_PER_CORE = 4
"""Processes that can share a CPU core, since ranks of tiny models often wait for each other."""

_FEW_PROCESSES = 8
"""Number of processes allowed on any host, however few cores it has."""


def train(args: Sequence[str]) -> int:
    """Run `torchtitan train`. Return 0 if the run finished or was stopped, 2 for a user's mistake,
    3 for a failure with a stated reason, 1 for a crash.

    Environment variables: `NGPU`, the processes on this host (default: one per GPU, or 1; on CPUs,
    more than four per core, or eight on a single one, only with `OVERSUBSCRIBE=1`); `NNODES`, the
    hosts, each with its `NODE_RANK`, which connect at `MASTER_ADDR` and `MASTER_PORT`; `LOG_RANK`,
    the ranks that print; `MAX_RESTARTS`, the restarts allowed after a crash or a hang.
    `COMM_MODE=fake_backend` selects a dry run, which reports the memory, work and time of any
    number of processes (`torchtitan.dry_run`) on `DEVICE`, a name such as h100 or a file, with
    `DEVICES_PER_HOST` (default: 8).
    """
    init_logger()
    os.environ[COMMAND_VARIABLE] = redact(_command(args))
    # Garbage collection only slows down the import of torch.
    gc.disable()
    use_expandable_segments()
    try:
        return _train(list(args))
    except Exception as raised:
        error = of_wrong_path(raised)
        code = exit_code_of(error)
        if code == 1:
            raise
        log_message(error)
        return code
    finally:
        gc.enable()


def _train(args: list[str]) -> int:
    from torchtitan.cli.early_checks import check_data, check_degrees, check_files
    from torchtitan.config.manager import ConfigManager

    checks = [check_degrees, check_files, check_data]
    resolved = ConfigManager(early_checks=checks).parse_args(args)
    if _is_dry_run():
        _dry_run(resolved.config)
        return 0
    # Ignore SIGPIPE, so that a connection closed by its peer raises an error instead of ending this
    # process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    hosts, processes = Hosts.from_environment(), _processes()
    check_log_ranks(hosts.count * processes)
    if hosts.rank == 0:  # whose first process alone sends metrics
        resolved.config.metrics.check_logins()
    if resolved.config.parallelism.auto:
        from torchtitan.cli.auto_layout import layout_words

        resolved.config.parallelism.auto = False
        args = [*args, *layout_words(resolved.config, hosts.count * processes, processes)]
        resolved = ConfigManager().parse_args(args)
    preflight = resolved.config.check(hosts.count * processes)
    fitting = with_fitting_mode(resolved, hosts.count * processes)
    max_restarts = _max_restarts(hosts)
    if hosts.count * processes > 1 or max_restarts > 0:
        if fitting is not resolved:
            args = [
                *args,
                f"--activation_checkpoint.mode={fitting.config.activation_checkpoint.mode}",
            ]
        return launch(args, hosts=hosts, processes=processes, max_restarts=max_restarts)
    run(with_preflight(fitting, preflight))
    return 0


def _dry_run(config: "Trainer.Config") -> None:
    from torchtitan.dry_run import dry_run
    from torchtitan.foresight.devices import device_in_file, device_named
    from torchtitan.foresight.prediction import predict_from_reports

    world_size = environment_number("NNODES") * environment_number("NGPU")
    name = os.environ.get("DEVICE", "h100")
    is_file = name.endswith((".yaml", ".yml"))
    device = device_in_file(Path(name)) if is_file else device_named(name, world_size)
    per_host = environment_number("DEVICES_PER_HOST", default=device.devices_per_host)
    reports = dry_run(config, world_size)
    try:
        prediction = predict_from_reports(config, reports, world_size, device, per_host)
    except UserError as error:  # after the report, which does not depend on the device
        print(f"No time is predicted: {presentable(str(error))} (DEVICE)")
        return
    print(presentable(str(prediction)))
    numbers = {  # by metric name, for the comparison in `torchtitan report`
        "step_time": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second * world_size,
        "mfu": 100 * prediction.mfu,
        "memory_gib": prediction.memory_gib,
    }
    durable.write(
        Path(config.dump_folder) / FORESIGHT,
        json.dumps({"device": device.name, **numbers}) + "\n",
    )


def _is_dry_run() -> bool:
    mode = os.environ.get("COMM_MODE", "")
    if mode not in ("", "fake_backend"):
        raise UserError(
            f"the environment variable COMM_MODE is '{mode}'; the only mode is `fake_backend`, a "
            "dry run"
        )
    return bool(mode)


def _processes() -> int:
    import torch

    gpus = torch.cuda.device_count()
    processes = environment_number("NGPU", default=max(1, gpus))
    if 0 < gpus < processes:
        raise UserError(
            f"the environment variable NGPU is {processes}, but this host has {gpus} GPU(s)"
        )
    if gpus == 0:
        _check_cores(processes)
    return processes


def _check_cores(processes: int) -> None:
    cores = usable_cores()
    limit = max(_FEW_PROCESSES, _PROCESSES_PER_CORE * cores)
    allowed = environment_number("OVERSUBSCRIBE", default=0, minimum=0)
    if processes > limit and not allowed:
        raise UserError(
            f"the environment variable NGPU is {processes}, but this host has no GPU and only "
            f"{cores} CPU core(s), enough for {limit} processes. Set OVERSUBSCRIBE=1 to start them "
            "anyway, or COMM_MODE=fake_backend to try a layout of any size without starting "
            "processes"
        )


def _max_restarts(hosts: Hosts) -> int:
    max_restarts = environment_number("MAX_RESTARTS", default=0, minimum=0)
    if max_restarts > 0 and hosts.count > 1:
        raise UserError(
            f"the environment variable MAX_RESTARTS is {max_restarts}, but NNODES is "
            f"{hosts.count}: this launcher restarts a single host only; for several hosts, use "
            "torchrun --max-restarts (docs/multinode.md)"
        )
    return max_restarts


def _command(args: Sequence[str]) -> str:
    names = (
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NGPU",
        "OVERSUBSCRIBE",
        "MAX_RESTARTS",
    )
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in names if name in os.environ]
    script = os.environ.get(PROGRAM_VARIABLE)
    return " ".join(
        [*variables, shlex.quote(script) if script else "torchtitan train", shlex.join(args)]
    )
