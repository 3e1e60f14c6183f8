"""Rewards: functions of a prompt, completion and row, or of a whole batch."""

import asyncio
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, cast

from torchtitan.components.data.finetuning.conversions import ANSWERS
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.images.files import ImageFile
from torchtitan.config.code import NamesCode
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import errors_of_user_code, is_canceled

Reward = Callable[..., object]
"""Returns a number for prompt, completion and the row of the dataset with the prompt; several
numbers by name, whose sum is the reward; or None for no verdict. It may be asynchronous. A
function whose first parameter is `prompts` takes lists, and returns one. A function with a
parameter `images` also gets the images of the prompt, or a list of these for each prompt."""

REWARD_MODEL = "reward_model="
BUILT_IN = ("pattern=", "length=", REWARD_MODEL)
"""Beginnings of built-in rewards with a parameter."""

RewardName = Annotated[str, NamesCode(built_in=BUILT_IN)]
"""One of `--rewards`: a built-in reward, or a function to import."""


def reference_answer(row: Mapping[str, object]) -> str:
    """Return the text of a row's reference answer. Raise `UserError` if it has none."""
    answer = next((row[column] for column in ANSWERS if row.get(column) is not None), None)
    if answer is None:
        raise UserError(f"it has no reference answer (column {', '.join(ANSWERS)})")
    return str(answer)


def number_match(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """Return 1 if the final answers of completion and reference are the same number, exactly, or
    the same list of numbers; else 0. Raise `UserError` without reference."""
    # deferred: its patterns take a quarter of a second, which other runs need not wait
    from torchtitan.components.rollout.answers import final_answer, numbers_of
    from torchtitan.components.rollout.exact_numbers import same_numbers

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
    from torchtitan.components.rollout.math_reward import MathReward  # deferred as above

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


class _Function(NamedTuple):
    """One of `--rewards`."""

    name: str
    short: str
    """Name in logs."""
    weight: float
    call: Reward
    parameters: Sequence[str]

    @property
    def subject(self) -> str:
        """Its name in messages."""
        return f"the reward function {self.name}"

    @property
    def rates_batches(self) -> bool:
        return self.parameters[:1] == ["prompts"]

    def result(self, text: Sequence[object], images: object) -> object:
        """Return the function's result, which may have to be awaited. Raise `UserError` that names
        the function if it fails."""
        more = {"images": images} if "images" in self.parameters else {}
        with errors_of_user_code(self.subject):
            return self.call(*text, **more)


@dataclass(slots=True)
class Rating:
    """Weighted sum of reward functions, and what each has returned."""

    value: float | None = None
    """None: no verdict."""
    named: dict[str, float] = field(default_factory=dict)

    def add(self, function: _Function, found: Any) -> None:
        """Add the result of a function. Raise `UserError` that names the function unless the result
        is a finite number, numbers by name, or None."""
        if found is None:
            return
        parts = found if isinstance(found, Mapping) else {"": found}
        for part, number in parts.items():
            try:
                value = float(number)
            except Exception:  # of any class, as the value
                value = math.nan
            if not math.isfinite(value):
                needed = "one finite number, finite numbers by name, or None"
                raise UserError(
                    f"{function.subject} returned {found!r:.60}, but must return {needed}"
                )
            self.value = (self.value or 0.0) + function.weight * value
            self.named[f"{function.short}/{part}" if part else function.short] = value


class Text(NamedTuple):
    """A prompt and its completion, with the row of the prompt."""

    prompt: str
    completion: str
    row: Mapping[str, object]
    images: Sequence[ImageFile] = ()
    """Images of the prompt."""


class Rewards:
    """Weighted sum of reward functions. Raises `UserError` for an unknown function, one that cannot
    be called with a prompt, a completion and a row, or a wrong number of weights."""

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
        self.names = names
        with errors_of("--rewards"):
            functions = [find_reward(name, open_model) for name in names]
            for name, function in zip(names, functions, strict=True):
                _check_parameters(name, function)
        shorts = [_short(name) for name in names]
        if len(set(shorts)) < len(names):
            shorts = list(names)
        parameters = map(_parameters_of, functions)
        columns = (names, shorts, weights or [1.0] * len(names), functions, parameters)
        every = [_Function(*one) for one in zip(*columns, strict=True)]
        self._of_batch = [one for one in every if one.rates_batches]
        self._single = [one for one in every if not one.rates_batches]

    def rated_now(
        self,
        prompt: str,
        completion: str,
        row: Mapping[str, object],
        images: Sequence[ImageFile] = (),
    ) -> Rating:
        """Return the rating by the functions of single completions. Raise `UserError` that names
        the function that fails, must be awaited, or rates a whole batch."""
        for function in self._of_batch:
            raise UserError(
                f"{function.name} rates a whole batch; use await engine.rate(text, row)"
            )
        rating = self._empty()
        for function in self._single:
            found = function.result((prompt, completion, row), images)
            if inspect.isawaitable(found):
                if inspect.iscoroutine(found):
                    found.close()
                raise UserError(
                    f"{function.subject} is asynchronous; use await engine.rate(text, row)"
                )
            rating.add(function, found)
        return rating

    async def rate(
        self,
        prompt: str,
        completion: str,
        row: Mapping[str, object],
        images: Sequence[ImageFile] = (),
    ) -> Rating:
        """Return the rating by the functions of single completions. Raise `UserError` that names
        the function that fails."""
        rating = self._empty()
        for function in self._single:
            found = function.result((prompt, completion, row), images)
            rating.add(function, await _awaited(found, function.subject))
        return rating

    async def totals(self, texts: Sequence[Text]) -> list[float | None]:
        """Return the sum of all functions for each text; None without a verdict. Asynchronous
        functions wait for all texts at a time. Raise `UserError` that names the function that
        fails."""
        single = await asyncio.gather(*(self.rate(*text) for text in texts))
        pairs = zip(single, await self.rate_batch(texts), strict=True)
        found = [[one.value for one in pair if one.value is not None] for pair in pairs]
        return [sum(values) if values else None for values in found]

    def _empty(self) -> Rating:
        """Return the rating without functions, 0, or before them, none."""
        return Rating(None if self.names else 0.0)

    @property
    def has_batch_functions(self) -> bool:
        """True if some functions rate a whole batch."""
        return bool(self._of_batch)

    async def rate_batch(self, texts: Sequence[Text]) -> list[Rating]:
        """Return the ratings of texts by the functions of a whole batch. Raise `UserError` that
        names the function that fails. Without texts, call none."""
        if not texts:
            return []
        ratings = [self._empty() for _ in texts]
        *columns, images = (list(column) for column in zip(*texts, strict=True))
        for function in self._of_batch:
            result = function.result(columns, images)
            found = await _awaited(result, function.subject)
            if not isinstance(found, Sequence) or len(found) != len(texts):
                raise UserError(
                    f"{function.subject} returned {found!r:.60}, but must return a list with a "
                    f"value for each of {len(texts)} completions"
                )
            for rating, value in zip(ratings, found, strict=True):
                rating.add(function, value)
        return ratings


def _short(name: str) -> str:
    """Return the name of a function, or the kind of a built-in reward, whose parameter may contain
    anything."""
    return name.partition("=")[0] if name.startswith(BUILT_IN) else name.rpartition(":")[2]


async def _awaited(value: object, subject: str) -> object:
    """Return a value, which may have to be awaited, with the errors of the user's code."""
    try:
        return await value if inspect.isawaitable(value) else value
    except BaseException as error:
        if is_canceled(error):
            raise
        with errors_of_user_code(subject):
            raise


def _check_parameters(name: str, function: Reward) -> None:
    """Raise `UserError` unless a function takes a prompt, a completion and a row, and nothing else
    but `images`, so that a run ends before its first rollouts."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    more = {"images": None} if "images" in signature.parameters else {}
    try:
        signature.bind(None, None, None, **more)
    except TypeError as error:
        raise UserError(
            f"{name} has the parameters {signature}, but is called as "
            "function(prompt, completion, row), or function(prompts, completions, rows) for a "
            "batch: give it these"
        ) from error


def _parameters_of(function: Reward) -> list[str]:
    """Return the names of parameters; none if the function has no signature, or only its name was
    checked."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
