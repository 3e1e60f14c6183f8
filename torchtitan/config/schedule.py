"""Options that change during training, such as the batch size."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Change(NamedTuple):
    """A new value of an option, after a number of steps or tokens."""

    after: int
    in_tokens: bool
    value: int


def parse_changes(words: Sequence[str]) -> list[Change]:
    """Return the changes for `["1000:64", "5e8t:128"]`: 64 after 1000 steps, 128 after 5e8 tokens. Raise `ValueError`
    for the first malformed word."""
    changes = []
    for word in words:
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)(t?):(\d+)", word, re.ASCII)
        after = float(match[1]) if match else 0.5
        if match is None or after != int(after) or int(match[3]) < 1:
            raise ValueError(word)
        changes.append(Change(int(after), bool(match[2]), int(match[3])))
    return changes


def value_at(changes: Sequence[Change], first: int, step: int, n_tokens: int) -> int:
    """Return the value after `step` steps and `n_tokens` tokens: the value of the last change in the list that has been
    reached, or `first`."""
    reached = [value for after, in_tokens, value in changes if (n_tokens if in_tokens else step) >= after]
    return reached[-1] if reached else first
