"""Rewards: plain functions of prompt, completion and row."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, cast

from torchtitan.components.data.finetuning.conversions import ANSWERS
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.rollout.answers import final_answer, numbers_of
from torchtitan.components.rollout.exact_numbers import same_numbers
from torchtitan.components.rollout.math_reward import MathReward
from torchtitan.config.code import NamesCode
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import errors_of_user_code

Reward = Callable[[str, str, Mapping[str, Any]], Any]
"""Returns one number for prompt, completion and the row of the dataset with the prompt."""

BUILT_IN = ("pattern=", "length=", "reward_model=")
"""Beginnings of built-in rewards with a parameter."""

RewardName = Annotated[str, NamesCode(built_in=BUILT_IN)]
"""One of `--rewards`: a built-in reward, or a function to import."""


def reference_answer(row: Mapping[str, Any]) -> str:
    """Return the text of a row's reference answer. Raise `UserError` if it has none."""
    answer = next((row[column] for column in ANSWERS if row.get(column) is not None), None)
    if answer is None:
        raise UserError(f"it has no reference answer (column {', '.join(ANSWERS)})")
    return str(answer)


def number_match(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the final answers of completion and reference are the same number, exactly, or
    the same list of numbers; else 0. Raise `UserError` without reference."""
    reference = reference_answer(row)
    expected = numbers_of(final_answer(reference))
    if not expected:
        _warn_of_no_number(reference[-60:])
    return float(same_numbers(expected, numbers_of(final_answer(completion))))


@functools.lru_cache(maxsize=10_000)
def _warn_of_no_number(reference: str) -> None:
    """Warn once of each reference."""
    logger.warning(
        "--rewards number pays nothing for the reference %r, which is no single number; use math",
        reference,
    )


def math_match() -> Reward:
    """Return a function that returns 1 if the final answers of completion and reference are equal,
    else 0. Raise `UserError` if math-verify is not installed."""
    equal = MathReward()
    return lambda prompt, completion, row: equal(reference_answer(row), completion)


def find_reward(name: str, open_model: Callable[[str], Reward] | None = None) -> Reward:
    """Return the function of `--rewards`: number, math, pattern=REGEX (1 if it occurs in the
    completion), length=N (1 for N characters, falling linearly to 0), reward_model=DIR, or a
    function to import. Raise `UserError` for others.
    """
    kind, _, value = name.partition("=")
    if name == "number":
        return number_match
    if name == "math":
        return math_match()
    if kind == "pattern":
        try:
            pattern = re.compile(value, re.DOTALL)
        except re.error as error:
            raise UserError(f"{name}: not a regular expression: {error}") from error
        return lambda prompt, completion, row: float(pattern.search(completion) is not None)
    if kind == "length" and value.isdecimal() and int(value):
        return lambda prompt, completion, row: max(0.0, 1 - abs(len(completion) / int(value) - 1))
    if kind == "reward_model" and value and open_model:
        return open_model(value)
    if ":" not in name or name.startswith(BUILT_IN):
        known = (
            "number, math, pattern=REGEX, length=N, reward_model=DIR, package.module:function or "
            "file.py:function"
        )
        raise UserError(f"{name} is unknown; use {known}")
    return cast(Reward, load_function(name))


class Rewards:
    """Weighted sum of reward functions. Raises `UserError` for an unknown function or a wrong
    number of weights."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        open_model: Callable[..., Any] | None = None,
    ):
        fits = not weights or (len(weights) == len(names) and all(map(math.isfinite, weights)))
        require(
            fits,
            "--reward_weights",
            list(weights),
            f"one finite number for each of {len(names)} --rewards",
        )
        with errors_of("--rewards"):
            self._functions = [(name, find_reward(name, open_model)) for name in names]
        self._weights = weights or [1.0] * len(names)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the reward. Raise `UserError` that names the function that fails."""
        total = 0.0
        for (name, function), weight in zip(self._functions, self._weights, strict=True):
            subject = f"the reward function {name}"
            with errors_of_user_code(subject):
                value = function(prompt, completion, row)
            try:
                total += weight * float(value)
            except Exception:  # of any class, as the value
                total = math.nan
            if not math.isfinite(total):
                raise UserError(
                    f"{subject} returned {value!r:.60}, but must return one finite number"
                )
        return total
