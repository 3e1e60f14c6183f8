"""Errors of commands that use the Hugging Face Hub."""

from torchtitan.tools.errors import UserError


def unreachable(endpoint: str, error: Exception) -> UserError:
    """Return the error for a Hub that does not answer, with the first line of the cause."""
    cause = str(error).strip().split("\n")[0] or type(error).__name__
    return UserError(
        f"{endpoint} cannot be reached ({cause}); check the network, then run this again"
    )
