"""Data loader for methods that generate answers: prompts, with optional reference answers."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt, Sample
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.prompt_position import PromptPosition
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import Kind, dataset_formats
from torchtitan.components.data.finetuning.sample_cache import first_columns
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.data.plan import Snapshot
from torchtitan.components.data.sources.source import AUTO, CHAT_DATASETS, Source, resolve_source
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torchtitan.components.data.finetuning.prompt_streams import PromptStreamDataLoader


def first_message(row: Mapping[str, Any]) -> dict[str, object]:
    """Return the prompt of a conversation: its messages before the first answer."""
    messages = itertools.takewhile(lambda message: message["role"] != "assistant", row["messages"])
    return {"prompt": list(messages)}


class PromptRowEncoder(RowEncoder):
    """Encodes prompts; reference answer and row stay JSON text."""

    stored: ClassVar[tuple[str, ...]] = ("answer",)
    can_fork = True

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        ids = self._chat.encode_prompt(sample.prompt)
        return EncodedRow((EncodedSample(ids, np.zeros(len(ids), bool)),), sample.answer_and_row())


class PromptDataLoader(PromptPosition[Snapshot], PlannedDataLoader):
    """Prompts for generation; see `PlannedDataLoader` for order and position.

    A batch has lists with an element for each sample: `prompts`, the token ids including the
    generation prompt, as `torchtitan.components.generation.generate` takes them; `answers`, the
    reference answer or None; `rows`, all columns; and `prompt_images`, the images of each prompt as
    JSON-serializable objects. A padding sample has an empty prompt, and `NO_DOCUMENT` in
    `documents`. `seq_len` limits the prompt without its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Prompts to answer."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Prompts longer than the sequence length: drop, truncate_left (keeps the end), or
        error."""

    config: Config
    kind: ClassVar[Kind] = "prompt"
    encoder_class: ClassVar[type[RowEncoder]] = PromptRowEncoder

    @classmethod
    def stream_class(cls) -> "type[PromptStreamDataLoader]":
        from torchtitan.components.data.finetuning.prompt_streams import PromptStreamDataLoader

        return PromptStreamDataLoader

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        texts = [json.loads(window[0].answer or "") if window else (None, {}) for window in windows]
        answers, rows = map(list, zip(*texts, strict=True))
        prompts = [window[0].ids.tolist() if window else [] for window in windows]
        images = [list(window[0].images) if window else [] for window in windows]
        return {"prompts": prompts, "answers": answers, "rows": rows, "prompt_images": images}

    def first_prompt(self) -> tuple[str, EncodedRow]:
        """Return the location and content of the first prompt of the data."""
        data = self.samples.sets[0]
        return data.describe(0), data.sample(0)

    def read_ahead(self, n_prompts: int) -> None:
        """Let up to `n_prompts` of later steps be read before a step ends, whose statistics then
        change the draws after them. Called before the first batch."""
        self._planner.ahead += n_prompts

    def read_position(self) -> Snapshot:
        """Return the position after the last batch that was read."""
        return self._position

    @property
    def position(self) -> Snapshot:
        return self._held or self._position


class PromptInBatch(NamedTuple):
    """A prompt of a batch."""

    ids: list[int]
    row: dict[str, object]
    document: int
    """Number in the data."""
    images: Sequence[Mapping[str, object]]


def prompts_in(batch: Batch) -> list[PromptInBatch]:
    """Return the prompts of a batch, without padding."""
    columns = (
        batch["prompts"],
        batch["rows"],
        batch["documents"][:, 0].tolist(),
        batch["prompt_images"],
    )
    prompts = itertools.starmap(PromptInBatch, zip(*columns, strict=True))
    return [prompt for prompt in prompts if prompt.document != NO_DOCUMENT]


def read_prompts(dataset: str, limit: int | None = None) -> list[Prompt]:
    """Return the first `limit` prompts (None: all) of a dataset as in `--dataloader.dataset` of
    reinforcement learning. Raise `UserError` for a row that cannot be read, and without prompts."""
    source = resolve_source(dataset, catalog=CHAT_DATASETS)
    assert isinstance(source, Source)
    prompts = list(itertools.islice(_prompts(dataset, source), limit))
    if not prompts:
        raise UserError(f"{source.name} has no prompts; add some, or name other data")
    return prompts


def _prompts(dataset: str, source: Source) -> Iterator[Prompt]:
    (format,) = dataset_formats([dataset], [first_columns(source)], AUTO, {}, "prompt")
    for row in source.rows(lambda _: None):
        if row.values is None:
            raise UserError(f"{row.where}: {row.error}")
        try:
            sample = format.convert(row.values)
        except (BrokenSample, UserError) as error:
            raise UserError(f"{row.where}: {error}") from None
        if sample is not None:
            assert isinstance(sample, Prompt)
            answer, values = json.loads(sample.answer_and_row())
            yield Prompt(sample.prompt, answer, values)
