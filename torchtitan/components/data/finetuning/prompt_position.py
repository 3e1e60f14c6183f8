"""The position in prompts whose answers are sampled."""

from collections.abc import Callable
from typing import Any, ClassVar

from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.samples import Windows, pack_windows


class PromptPosition:
    """What a loader of prompts has for methods that sample their answers; the first base of a
    loader."""

    packs_answers: ClassVar[bool] = True
    """True if a window may hold several prompts with their answers."""
    _held: Any = None

    def hold(self, position: Any) -> None:
        """Let `position` be this one, which `read_position` returned, while further batches are
        read ahead of their steps."""
        self._held = position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = None
        super().load_state_dict(state)  # type: ignore[misc]

    def image_reader(self) -> Any:
        """Return what reads the images of prompts for the model; None if they are text."""
        return None

    def answer_batch_maker(self) -> Callable[[Windows, int], Batch]:
        """Return the function that makes batches of windows of prompts with their answers."""
        return pack_windows
