"""Errors of users' code: their place in it, and exits, which would end a run as if it were
complete."""

import asyncio
import contextlib
import signal
import site
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from torchtitan.tools.errors import RunFailure, UserError, in_words

_OWN_FOLDER = str(Path(__file__).resolve().parent.parent)
_INSTALLED_FOLDERS = (
    sysconfig.get_paths()["stdlib"],
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_MAX_FRAMES = 3
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Errors that end a program without a message, and are not an `Exception`."""


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error in files of the user: neither of this package, nor
    installed."""
    return [
        frame for frame in _other_frames(error) if not frame.filename.startswith(_INSTALLED_FOLDERS)
    ]


def _other_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((f"{_OWN_FOLDER}/", "<"))]


def with_place(error: BaseException) -> str:
    """Return type and message of an error with its last frames in the user's code, the innermost
    first."""
    frames = user_frames(error) or _other_frames(error)
    places = [
        f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        for frame in frames[::-1][:_MAX_FRAMES]
    ]
    return f"{in_words(error)} ({'; from '.join(places)})" if places else in_words(error)


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an error may be Ctrl-C, which must end the program; otherwise code has raised
    it."""
    is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # in ranks
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and is_default and not is_blocked


def is_canceled(error: BaseException) -> bool:
    """Return whether asyncio cancels the task that runs now; otherwise code has raised the
    error."""
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # without an event loop, nothing is canceled
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
    return False


def is_of_user(error: BaseException) -> bool:
    """Return whether an error comes from the user's code or input, which the user can mend."""
    if isinstance(error, RunFailure) or is_ctrl_c(error):
        return False
    return (
        isinstance(error, UserError) or not isinstance(error, Exception) or bool(user_frames(error))
    )


@contextlib.contextmanager
def errors_of_user_code(subject: str) -> Iterator[None]:
    """Raise `UserError` for any error in the block, such as `SystemExit`, with the place in the
    user's code."""
    try:
        yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise UserError(f"{subject} failed: {with_place(error)}") from error


@contextlib.contextmanager
def exits_as_errors(subject: str) -> Iterator[None]:
    """Raise `UserError` for an exit in the block (`SystemExit`, or `KeyboardInterrupt` raised by
    code), with its place; otherwise the program would end without a message, possibly as if it had
    succeeded."""
    try:
        yield
    except EXITS as error:
        if is_ctrl_c(error):
            raise
        raise UserError(
            f"{subject} was ended by {with_place(error)}; raise an exception instead"
        ) from error
