"""Prompts that are streamed during training."""

from collections.abc import Callable
from typing import Any

from torchtitan.components.data.finetuning.prompt_position import PromptPosition
from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
from torchtitan.tools.digests import digest_of


class PromptStreamDataLoader(PromptPosition, RowStreamDataLoader):
    """Prompts of streams; see `RowStreamDataLoader`."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data, and of the numbers of its prompts, which depend on the number of
        readers."""
        layout = self._layout
        return digest_of([self._batches.fingerprint, layout.dp_world_size, layout.num_workers])

    def read_ahead(self, n_prompts: int) -> None:
        """Prompts of streams may be read any time ahead: steps do not change their order."""

    def read_position(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state after the last batch that was read."""
        return super().present_state()

    def state_dict(self) -> dict[str, Any]:
        return self.present_state()()

    def present_state(self) -> Callable[[], dict[str, Any]]:
        return self._held or self.read_position()
