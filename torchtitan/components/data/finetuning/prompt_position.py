"""The position in prompts whose answers are sampled."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.samples import Windows, pack_windows
from torchtitan.components.data.plan.sampler import State

P = TypeVar("P")


class PromptPosition(Generic[P]):
    """Base of prompt loaders for methods that sample their answers; it comes first in the list of
    bases. `P` is a position in the prompts, as `read_position` returns it."""

    packs_answers: ClassVar[bool] = True
    """True if a window may hold several prompts with their answers."""
    _held: P | None = None

    def hold(self, position: P) -> None:
        """Keep `position` at this value of `read_position` while further batches are read ahead of
        their steps."""
        self._held = position

    def load_state_dict(self, state: State) -> None:
        self._held = None
        super().load_state_dict(state)  # type: ignore[misc]

    def image_reader(self) -> Any:
        """Return the reader of prompt images; None if prompts are text."""
        return None

    def answer_batch_maker(self) -> Callable[[Windows, int], Batch]:
        """Return the function that makes batches of windows of prompts with their answers."""
        return pack_windows
