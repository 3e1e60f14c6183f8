"""Prompts that are streamed during training."""

from collections.abc import Callable

from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.prompt_position import PromptPosition
from torchtitan.components.data.finetuning.row_batches import BatchEncoder
from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
from torchtitan.components.data.plan.sampler import State
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import StreamSource
from torchtitan.tools.digests import digest_of


class PromptStreamDataLoader(PromptPosition[Callable[[], State]], RowStreamDataLoader):
    """Prompts of streams; see `RowStreamDataLoader`."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data, and of the numbers of its prompts, which depend on the number of
        readers."""
        layout = self._layout
        return digest_of([self._batches.fingerprint, layout.dp_world_size, layout.num_workers])

    def first_prompt(self) -> tuple[str, EncodedRow] | None:
        """Return the location and content of the prompt in the first row; None if it has none."""
        config = self.config
        source, format = config.rows()[0]
        row = (
            Row(f"{source.name}, row 1", source.first_row(source.open_rows))
            if isinstance(source, StreamSource)
            else next(iter(source.rows(lambda _: None)))
        )
        encoder = BatchEncoder(
            format, config.encoder(self._tokenizer, self.template), config.filters()
        )
        found = [one for one in encoder.results(row) if isinstance(one, EncodedRow)]
        return (row.where, found[0]) if found else None

    def read_ahead(self, n_prompts: int) -> None:
        """Prompts of streams may be read any time ahead: steps do not change their order."""

    def read_position(self) -> Callable[[], State]:
        """Return a function that returns the state after the last batch that was read."""
        return super().present_state()

    def state_dict(self) -> State:
        return self.present_state()()

    def present_state(self) -> Callable[[], State]:
        return self._held or self.read_position()
