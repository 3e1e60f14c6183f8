"""Environments: what answers the model's turns, and rewards them."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchtitan.components.data.finetuning.conversation import normalize
from torchtitan.components.rollout.chat import Message, Reply, Tools
from torchtitan.components.rollout.trajectory import is_finite
from torchtitan.tools.errors import UserError, errors_of

T = TypeVar("T")

Messages = str | Message | Sequence[Message] | None
"""A text of the user, a message, or several."""


@dataclass(slots=True)
class Step:
    """The answer of an environment to a turn of the model."""

    message: Messages = None
    """Text of the user, or messages, such as one of the role `tool` for each call."""
    reward: float | None = 0.0
    """None: no verdict on the trajectory."""
    is_done: bool = False
    """True if the turn was the last one; no message follows."""
    named: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, such as the number of guesses; later ones replace earlier ones."""


class Environment:
    """Subclass it, and name the class in `--rollout.function`. Each trajectory has an object of its
    own. All methods may be asynchronous; thousands then wait at a time."""

    tools: Tools = ()
    """JSON schemas of functions that the model may call; `reset` may set them."""
    max_turns = 16
    """Turns of the model after which the trajectory ends."""
    rewards_per_turn = False
    """True if the reward of a step is for its turn and earlier ones; otherwise, it is for all
    turns."""

    def reset(self, row: Mapping[str, object]) -> Messages | Awaitable[Messages]:
        """Begin with a row of the data, and return the first messages (`Messages`). None: the row's
        prompt."""
        return None

    def step(self, reply: Reply) -> Step | Awaitable[Step]:
        """Return the `Step` after a turn of the model."""
        raise NotImplementedError

    def close(self) -> object:
        """Free what the environment holds; called once, even after an error."""


def messages_of(messages: Messages) -> list[Message]:
    """Return a list of messages in the form that templates read: parts of text joined, and
    arguments of calls as objects. Raise `UserError` for a value of another type, and messages that
    are not text, such as images."""
    if messages is None:
        return []
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    every = [messages] if isinstance(messages, Mapping) else messages
    if not isinstance(every, Sequence) or not all(isinstance(one, Mapping) for one in every):
        raise UserError(
            "an environment's messages must be a text, a message, a list of messages or None, "
            f"not {messages!r:.60}"
        )
    with errors_of("an environment's messages"):
        return [*normalize([dict(one) for one in every]).messages] if every else []


def checked_step(step: object, name: str) -> Step:
    """Return what `step` of an environment has returned. Raise `UserError`, with the environment's
    name, unless it is a `Step` whose reward is a finite number, or None."""
    if not isinstance(step, Step):
        raise UserError(f"{name}.step must return a Step, not {step!r:.60}")
    if step.reward is not None and not is_finite(step.reward):
        raise UserError(
            f"{name}.step returned the reward {step.reward!r:.60}, but must return a finite "
            "number, or None for no verdict"
        )
    if not isinstance(step.named, Mapping):
        raise UserError(f"{name}.step returned named {step.named!r:.60}, but it must be a mapping")
    return step


async def result_of(value: Awaitable[T] | T) -> T:
    """Return a value, which may have to be awaited."""
    if inspect.isawaitable(value):
        result: T = await value
        return result
    assert not isinstance(value, Awaitable)
    return value
