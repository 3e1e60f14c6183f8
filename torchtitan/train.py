"""Entry point of one training process: `python -m torchtitan.train --module M --config C …`, also under torchrun."""

import contextlib
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

_LAUNCHER = 0  # standard input: a socket whose other end is our launcher's
_MAX_REPORT_LENGTH = 20_000  # characters; the connection's buffer holds them all, so that sending never waits


def run(job: "Job") -> None:
    """Build the trainer of a configuration that has been checked, train, and leave together with the other ranks.

    Whatever is raised is raised as it is: a process group that lost a rank cannot be left in an orderly way.
    """
    trainer = job.config.build()
    trainer.load_checkpoint()
    # Not before: a run that cannot start leaves the file of the one before it as it is.
    if trainer.rank == 0:
        _save_config(dataclasses.replace(job, config=trainer.config), fresh=trainer.step == 0)
    trainer.train()
    trainer.close()


def _save_config(job: "Job", *, fresh: bool) -> None:
    """Write the resolved configuration to the run's folder; a fresh run keeps that of the run before it."""
    from torchtitan.components.metric_sinks import set_aside

    folder = job.config.dump_folder
    path = Path(folder) / "config.yaml"
    try:
        if fresh and path.exists():
            set_aside(path)
        job.save(path)
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
    launched = LAUNCHER_VARIABLE in os.environ
    if launched:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    elif "RANK" not in os.environ:
        os.environ[COMMAND_VARIABLE] = f"python -m torchtitan.train {shlex.join(words)}"
    try:
        _parse_and_run(words, checked=launched)
    except Exception as error:
        code = exit_code_of(error)
        if launched:
            _report(error, code)
            # Not through the interpreter's own end: what is left of a process group that lost a rank may abort there.
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code)
        elif code == 1:
            raise
        else:
            logger.error("%s", error)
        return code
    return 0


def _parse_and_run(words: list[str], *, checked: bool) -> None:
    # Imported once the launcher is watched: torch takes seconds, and must not outlive it either.
    from torchtitan.config.manager import ConfigManager

    job = ConfigManager("python -m torchtitan.train").parse_args(words)
    if not checked:
        job.config.check(int(os.environ.get("WORLD_SIZE", "1")))
    run(job)


def _end_with_launcher() -> None:
    """End this process when the launcher, at the other end of standard input, has gone: it never sends anything."""
    with contextlib.suppress(OSError):
        os.read(_LAUNCHER, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _report(error: Exception, code: int) -> None:
    """Tell the launcher what to say; it says it for the rank that failed first."""
    text = "".join(traceback.format_exception(error)).rstrip() if code == 1 else str(error)
    report = {"time": time.time(), "code": code, "text": text[-_MAX_REPORT_LENGTH:]}
    os.write(_LAUNCHER, json.dumps(report, ensure_ascii=False).encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
