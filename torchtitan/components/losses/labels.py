"""Labels of tokens, without torch."""

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""
