"""A text that the generation engine continues, and its continuation."""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from torchtitan.components.generation.sampling import RandomNumbers, Sampling
from torchtitan.components.images.files import ImageFile

ResultT = TypeVar("ResultT")
TextCoroutine = Coroutine[Any, Any, ResultT]
"""Awaits texts of an engine, and perhaps more, as `Engine.run` takes it."""

OnToken = Callable[[int], bool]
"""Called with each new token except stop tokens; return True to end the text."""

PADDING = 0
"""An arbitrary token: nothing attends to it."""


@dataclass(slots=True)
class Generation:
    """Continuation of one prompt."""

    ids: list[int] = field(default_factory=list)
    """New tokens, ending with the stop token, if any."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of each new token's probability at temperature 1, before top_k, top_p and
    min_p; with `logprobs_of="sampling"`, in the distribution that the token was drawn from."""
    finish_reason: Literal["stop", "length"] = "length"
    """`stop`: ended by a stop token or `on_token`. `length`: reached max_new_tokens."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token, the most probable ones with their log-probabilities, in descending
    order."""
    versions: list[int] = field(default_factory=list)
    """For each new token, `Engine.version` when it was drawn."""
    n_reused: int = 0
    """Tokens of the prompt whose keys and values were kept from an earlier text."""
    experts: npt.NDArray[np.int16] | None = None
    """With `Engine(records_experts=True)`: the experts of each token that the model has computed,
    of the prompt and all new ones but the last, (tokens, layers, experts of a token), when it was
    computed first; -1: a layer without experts."""


@dataclass(slots=True, eq=False)
class Row:
    """A text in the batch, or waiting for room in it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    numbers: RandomNumbers
    on_token: OnToken | None
    sampling: Sampling
    n_top: int
    generation: Generation
    images: Sequence[ImageFile] = ()
    is_continued: bool = False
    """True if a later prompt begins with its text."""
    decoded: list[Any] = field(default_factory=list)
    """Its images, while it is in the batch."""
    is_done: bool = False
    start: tuple[int, ...] = field(init=False)
    """Tokens that are computed before the row joins the batch."""
    end: Callable[[Generation], None] = field(init=False)
    """Passes the finished text to what awaits it."""

    def __post_init__(self) -> None:
        self.start = self.prompt

    def __await__(self) -> Generator["Row", Generation, Generation]:
        return (yield self)

    @property
    def tokens(self) -> list[int]:
        """All tokens; of a finished row, which may stay in the batch, a single one that is not
        read."""
        return [PADDING] if self.is_done else [*self.prompt, *self.generation.ids]

    @property
    def last_token(self) -> int:
        """The last of `tokens`."""
        if self.is_done:
            return PADDING
        return self.generation.ids[-1] if self.generation.ids else self.prompt[-1]

    @property
    def n_tokens(self) -> int:
        return 1 if self.is_done else len(self.prompt) + len(self.generation.ids)
