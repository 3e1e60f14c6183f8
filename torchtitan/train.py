"""Entry point of one training process: `python -m torchtitan.train --module M --config C …`, also under torchrun."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan.config.manager import ConfigManager, Job
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.signals import COMMAND_VARIABLE

TOLD_BY_MESSAGE = {2: UserError, 3: RunFailure}
"""Exit code → the errors whose message says all; every other error exits with 1 and its traceback."""


def run(job: Job) -> None:
    """Build the trainer of a configuration that has been validated, train, and leave together with the other ranks.

    Whatever is raised is raised as it is: a process group that lost a rank cannot be left in an orderly way.
    """
    trainer = job.config.build()
    if trainer.rank == 0:
        Job(job.module, job.config_name, trainer.config).save(Path(trainer.config.dump_folder) / "config.yaml")
    trainer.train()
    trainer.close()


def run_worker(args: list[str]) -> None:
    """One process of several, started by our launcher, which has validated the configuration and reports errors."""
    init_logger()
    try:
        run(ConfigManager().parse_args(args))
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        get_error_handler().record_exception(error)
        sys.exit(code)


def exit_code_of(error: Exception) -> int | None:
    """The exit code of an error that is told by its message alone; None for one that needs its traceback."""
    codes = {code for code, kind in TOLD_BY_MESSAGE.items() if isinstance(error, kind)}
    return codes.pop() if codes else None


def main(args: Sequence[str] | None = None) -> int:
    """Parse, check, build, train, close; the process's exit code. For a single process, or one under torchrun."""
    init_logger()
    words = list(sys.argv[1:] if args is None else args)
    os.environ.setdefault(COMMAND_VARIABLE, f"python -m torchtitan.train {' '.join(words)}")
    try:
        job = ConfigManager("python -m torchtitan.train").parse_args(words)
        job.config.check(int(os.environ.get("WORLD_SIZE", "1")))
        run(job)
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        logger.error("%s", error)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
