"""Exceptions that the command line prints as a short message instead of a traceback."""


class UserError(ValueError):
    """A mistake in the user's input: a value, a file, a combination of settings.

    The message names the offending value and the remedy. The command line prints it and exits with code 2; every other
    exception keeps its traceback. A `ValueError`, so that users of single parts need no special handling.
    """


class RunComplete(Exception):
    """A run with nothing left to train. The command line prints the message and exits with code 0."""


class RunFailure(RuntimeError):
    """A run that cannot continue, for the reason in the message. The command line exits with code 3."""
