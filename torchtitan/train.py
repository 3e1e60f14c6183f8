"""Entry point of one training process: `python -m torchtitan.train --module M --config C …`, also under torchrun."""

import dataclasses
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.signals import COMMAND_VARIABLE, LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from torchtitan.config.manager import Job


def run(job: "Job") -> None:
    """Build the trainer of a configuration that has been checked, train, and leave together with the other ranks.

    Whatever is raised is raised as it is: a process group that lost a rank cannot be left in an orderly way.
    """
    trainer = job.config.build()
    trainer.load_checkpoint()
    # Not before: a run that cannot start leaves the file of the one before it as it is.
    if trainer.rank == 0:
        _save_config(dataclasses.replace(job, config=trainer.config))
    trainer.train()
    trainer.close()


def _save_config(job: "Job") -> None:
    folder = job.config.dump_folder
    try:
        job.save(Path(folder) / "config.yaml")
    except OSError as error:
        raise UserError(f"--dump_folder '{folder}' cannot be written: {error.strerror}") from error


def exit_code_of(error: BaseException) -> int:
    """2 for a user's mistake, 3 for a run that failed for a stated reason: their message says all. 1 for a crash."""
    if isinstance(error, UserError):
        return 2
    return 3 if isinstance(error, RunFailure) else 1


def main(args: Sequence[str] | None = None) -> int:
    """Parse, check, build, train, close; the process's exit code."""
    init_logger()
    words = list(sys.argv[1:] if args is None else args)
    report = os.environ.get(LAUNCHER_VARIABLE)
    if report:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    elif "RANK" not in os.environ:
        os.environ[COMMAND_VARIABLE] = f"python -m torchtitan.train {shlex.join(words)}"
    try:
        _parse_and_run(words, checked=bool(report))
    except Exception as error:
        code = exit_code_of(error)
        if report:
            _write_report(Path(report), error, code)
        elif code == 1:
            raise
        else:
            logger.error("%s", error)
        return code
    return 0


def _parse_and_run(words: list[str], *, checked: bool) -> None:
    # Imported here, so that a signal that arrives while torch is imported finds `main` begun.
    from torchtitan.config.manager import ConfigManager

    job = ConfigManager("python -m torchtitan.train").parse_args(words)
    if not checked:
        job.config.check(int(os.environ.get("WORLD_SIZE", "1")))
    run(job)


def _end_with_launcher() -> None:
    """End this process when the launcher, which holds the other end of standard input, has gone."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _write_report(path: Path, error: Exception, code: int) -> None:
    """Leave for the launcher what to say; it shows the report of the rank that failed first."""
    text = "".join(traceback.format_exception(error)).rstrip() if code == 1 else str(error)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"time": time.time(), "code": code, "text": text}))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
