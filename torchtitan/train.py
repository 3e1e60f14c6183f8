"""Entry point of one training process: `python -m torchtitan.train --module M --config C …`, also
under torchrun."""

# ruff: noqa: E402 (imports must follow the change of sys.path)
import os
import sys

# As in torchtitan/__main__.py, keep the current folder, which may be untrusted, from shadowing
# libraries.
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

import dataclasses
import logging
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools import process
from torchtitan.tools.errors import RunComplete, RunFailure, UserError, of_wrong_path, os_errors_as
from torchtitan.tools.logging import check_log_ranks, init_logger, logger, presentable
from torchtitan.tools.redact import redact
from torchtitan.tools.user_code import exits_as_errors

if TYPE_CHECKING:
    from torchtitan.config.manager import ResolvedConfig
    from torchtitan.trainer.config import Preflight

_FIRST_RANK_SECONDS = 5.0
"""Time that other ranks wait for the first rank of a host to report a user's mistake."""


def run(resolved: "ResolvedConfig") -> None:
    """Train with a validated configuration, then shut down together with the other ranks. After an
    error, skip the orderly shutdown, since a process group that has lost a rank cannot be destroyed
    cleanly."""
    from torchtitan.tools.cpu_products import onednn_products
    from torchtitan.tools.device import device_type

    if device_type() == "cpu":
        process.keep_freed_memory()
    with onednn_products(), exits_as_errors("the run"):
        _run(resolved)


def _run(resolved: "ResolvedConfig") -> None:
    from torchtitan.distributed.phases import START_UP
    from torchtitan.distributed.process_group import timeouts_named

    with timeouts_named(lambda: START_UP):
        trainer = resolved.config.build()
    trainer.phases.begin_at(process.STARTED)
    with timeouts_named(lambda: trainer.phases.failed_in or trainer.phases.phase):
        _check_same_mode(trainer.config.activation_checkpoint.mode)
        trainer.load_checkpoint()
        # Save only now, so that a run that cannot start does not replace the previous run's file.
        if trainer.rank == 0:
            _save_config(
                dataclasses.replace(resolved, config=trainer.config), fresh=trainer.step == 0
            )
        trainer.train()
        trainer.close()


def _check_same_mode(mode: str) -> None:
    """Raise `UserError` if hosts with different GPUs chose different recomputation, which would not
    communicate alike."""
    from torchtitan.distributed.process_group import gather_objects

    if len(modes := sorted(set(gather_objects(mode)))) > 1:
        raise UserError(
            f"--activation_checkpoint.mode auto chose {' and '.join(modes)} on different hosts; "
            "set one of them"
        )


def _save_config(resolved: "ResolvedConfig", *, fresh: bool) -> None:
    """Write the resolved configuration to the run's folder; a fresh run keeps the previous run's
    file."""
    from torchtitan.components.observe.metric_sinks import set_aside

    folder = resolved.config.dump_folder
    path = Path(folder) / "config.yaml"
    with os_errors_as(f"--dump_folder '{folder}' cannot be written"):
        if fresh and path.exists():
            set_aside(path)
        resolved.save(path)


def exit_code_of(error: BaseException) -> int:
    """Return 2 for a user's mistake, 3 for a failure with a stated reason, 1 for a crash, 0 for a
    completed run."""
    if isinstance(error, RunComplete):
        return 0
    if isinstance(error, UserError):
        return 2
    return 3 if isinstance(error, RunFailure) else 1


def log_message(error: BaseException) -> None:
    """Log the message of an error that needs no traceback."""
    logger.log(logging.INFO if isinstance(error, RunComplete) else logging.ERROR, "%s", error)


def main(args: Sequence[str] | None = None) -> int:
    """Parse, check, build, train and close; return the exit code."""
    init_logger()
    words = list(sys.argv[1:] if args is None else args)
    if process.is_launched():
        process.exit_with_launcher()
    elif "RANK" not in os.environ:
        os.environ[process.COMMAND_VARIABLE] = redact(
            f"python -m torchtitan.train {shlex.join(words)}"
        )
    process.use_expandable_segments()
    try:
        _parse_and_run(words)
    except (SystemExit, KeyboardInterrupt):  # of --help, and Ctrl-C
        raise
    except BaseException as raised:
        error = of_wrong_path(raised)
        code = exit_code_of(error)
        if "RANK" in os.environ:
            _report_error(error, code)
            process.exit_process(code)
        if code == 1:
            raise
        log_message(error)
        return code
    return 0


def _parse_and_run(words: list[str]) -> None:
    # Import torch, which takes seconds, only after this process has begun to watch the launcher.
    from torchtitan.config.manager import ConfigManager

    if "COMM_MODE" in os.environ:
        raise UserError(
            "the environment variable COMM_MODE is supported only by `torchtitan train`"
        )
    resolved = ConfigManager("python -m torchtitan.train").parse_args(words)
    if not process.is_launched():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_log_ranks(world_size)
        preflight = resolved.config.check(world_size)
        resolved = with_preflight(with_fitting_mode(resolved, world_size), preflight)
    run(resolved)


def with_preflight(resolved: "ResolvedConfig", preflight: "Preflight | None") -> "ResolvedConfig":
    """Return the configuration with what its check has found, for a run in this process."""
    config = dataclasses.replace(resolved.config, preflight=preflight)
    return dataclasses.replace(resolved, config=config)


def with_fitting_mode(resolved: "ResolvedConfig", world_size: int) -> "ResolvedConfig":
    """Return the configuration with activation checkpointing that fits, if it leaves the choice
    open."""
    if resolved.config.activation_checkpoint.mode != "auto":
        return resolved
    from torchtitan.dry_run.fitting import with_fitting_checkpoints

    return dataclasses.replace(
        resolved, config=with_fitting_checkpoints(resolved.config, world_size)
    )


def _is_repeating() -> bool:
    """Return whether torchrun's first rank on this host will report the same user's mistakes."""
    return not process.is_launched() and os.environ.get("LOCAL_RANK", "0") != "0"


def _report_error(error: BaseException, code: int) -> None:
    """Report an error to the launcher, which prints the first failure, or print it."""
    if process.is_launched():
        text = "".join(traceback.format_exception(error)).rstrip() if code == 1 else str(error)
        process.report_failure(code, text, passing=code == 1 or getattr(error, "passing", False))
    elif code == 1:
        print(presentable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    else:
        if code == 2 and _is_repeating():
            time.sleep(_FIRST_RANK_SECONDS)
        log_message(error)


if __name__ == "__main__":
    sys.exit(main())
