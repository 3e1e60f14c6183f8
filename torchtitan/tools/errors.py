"""Exceptions that the command line prints as a short message instead of a traceback."""

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

_NAMED_IN_ERRORS = 5


class UserError(ValueError):
    """A mistake in the user's input. The message names the offending value and the remedy; the
    command line prints it without a traceback and exits with code 2. A subclass of `ValueError`,
    for users of single components."""


class SharedError(UserError):
    """An error that all ranks of a run raise at the same place, so that they can still save
    together."""


class UnsupportedModelError(UserError):
    """A description of a model that the code of its family does not compute."""


def require(holds: bool, name: str, value: object, what: str) -> None:
    """Raise `UserError` unless the condition holds: the option `name` has this value, but must be
    `what`."""
    if not holds:
        raise UserError(f"{name} is {value}, but must be {what}")


@contextlib.contextmanager
def os_errors_as(message: str, remedy: str = "") -> Iterator[None]:
    """Turn an `OSError`, or text that is not UTF-8, in the block into a `UserError`: the message
    ("x cannot be read"), the reason, the remedy."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{message}: {getattr(error, 'strerror', None) or error}{remedy}"
        ) from error


@contextlib.contextmanager
def errors_of(subject: str) -> Iterator[None]:
    """Begin the message of a `UserError` in the block with its subject, such as an option."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{subject}: {error}") from error


def suggest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the known name closest to `name`, or "" if all are less
    alike than `cutoff`."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def summarize_names(names: Sequence[str]) -> str:
    """Return the first few names and the total number for a message."""
    more = f", … ({len(names)} in all)" if len(names) > _NAMED_IN_ERRORS else ""
    return ", ".join(names[:_NAMED_IN_ERRORS]) + more


def of_wrong_path(error: BaseException) -> BaseException:
    """Return a `UserError` for an error about a name that no file can have, too long or with a NUL
    byte; other errors unchanged."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(
            f"'{str(error.filename)[:80]}...' is too long for the name of a file; use a shorter one"
        )
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return UserError("the name of a file has a NUL byte; remove it")
    return error


def in_words(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class RunComplete(Exception):
    """A run with nothing left to train. The command line prints the message and exits with code
    0."""


class RunFailure(RuntimeError):
    """A run that cannot continue, for the reason in the message. The command line exits with code
    3."""

    passing: ClassVar[bool] = False
    """True if the same run may succeed when it starts again."""
