"""Options that change during training, such as the batch size."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from torchtitan.tools.errors import UserError


class Change(NamedTuple):
    """A new value of an option, after a number of steps or tokens. `text` is its part of the
    command line."""

    text: str
    after: int
    in_tokens: bool
    value: int

    def steps_ahead(self, step: int, n_tokens: int, tokens_per_step: int) -> int:
        """Return the steps to take after `step`, which ends at `n_tokens`, until the change; 0 or
        less if reached."""
        return (
            -((n_tokens - self.after) // tokens_per_step) if self.in_tokens else self.after - step
        )


def parse_changes(option: str, first: int, words: Sequence[str]) -> list[Change]:
    """Return `first`, the value at step 0, and the changes for `["1000:64", "5e8t:128"]`: 64 after
    1000 steps, 128 after 5e8 tokens. Raise `UserError` for a malformed word of the training
    option."""
    changes = [Change(f"--training.{option}", 0, False, first)]
    for word in words:
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)(t?):(\d+)", word, re.ASCII)
        after = float(match[1]) if match else 0
        if match is None or after != int(after) or min(after, int(match[3])) < 1:
            raise UserError(
                f"--training.{option} '{word}' is not like 1000:64 (64 after 1000 steps, at least "
                "1) or 5e8t:64 (after 5e8 tokens)"
            )
        changes.append(
            Change(f"--training.{option} {word}", int(after), bool(match[2]), int(match[3]))
        )
    return changes


def change_at(changes: Sequence[Change], step: int, n_tokens: int) -> Change:
    """Return the last change in the list that `step` steps with `n_tokens` tokens have reached."""
    return [change for change in changes if change.steps_ahead(step, n_tokens, 1) <= 0][-1]
