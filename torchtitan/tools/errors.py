"""The exceptions that the command line turns into a short message instead of a traceback."""


class UserError(ValueError):
    """A mistake in what the user gave: a value, a file, a combination of settings.

    The message names the offending value and says what to do. The command line prints it as it is and exits
    with code 2; every other exception keeps its traceback. As a `ValueError` it needs no special handling by
    those who import single parts.
    """


class RunComplete(Exception):
    """A run that has nothing left to train. The command line prints the message and exits with code 0."""


class RunFailure(RuntimeError):
    """A run that cannot go on for a reason that the message says in full. The command line exits with code 3."""
