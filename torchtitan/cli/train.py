"""`torchtitan train`: checks the configuration once, then trains in this process or starts one per device."""

import gc
import os
import shlex
import sys
from collections.abc import Sequence

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.signals import COMMAND_VARIABLE


def train(args: Sequence[str]) -> int:
    """Train what the command line says; 0 when the run finished or was stopped, 2 for a user's mistake,
    3 for a run that failed for a stated reason, 1 for a crash.

    The environment says on how many processes: `NGPU` on this host (default: one per GPU, or 1), `NNODES` hosts with
    `MASTER_ADDR` and `MASTER_PORT`. `LOG_RANK` says which ranks print.
    """
    # Collecting while torch is imported only scans its objects again and again.
    gc.disable()
    from torchtitan.train import exit_code_of

    init_logger()
    os.environ.setdefault(COMMAND_VARIABLE, _command(args))
    try:
        return _train(list(args))
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        logger.error("%s", error)
        return code
    except KeyboardInterrupt:
        return 130  # what a shell reports for a command that was interrupted
    finally:
        gc.enable()


def _train(args: list[str]) -> int:
    from torchtitan.config.manager import ConfigManager
    from torchtitan.train import run

    job = ConfigManager().parse_args(args)
    nodes, processes = _environment_number("NNODES", 1), _environment_number("NGPU", _default_processes())
    job.config.check(nodes * processes)
    if nodes * processes == 1:
        run(job)
        return 0
    from torchtitan.cli.launch import launch

    return launch(args, nodes=nodes, processes=processes)


def _default_processes() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"the environment variable {name} is '{text}', and must be a number of at least 1")
    return int(text)


def _command(args: Sequence[str]) -> str:
    variables = [f"{name}={os.environ[name]}" for name in ("NNODES", "NGPU") if name in os.environ]
    return " ".join([*variables, "torchtitan", "train", *map(shlex.quote, args)])


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
