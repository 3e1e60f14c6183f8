"""Prompts of a dataset as conversations, without a cache."""

import itertools
import json
from collections.abc import Iterator

from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt
from torchtitan.components.data.finetuning.row_formats import AUTO, dataset_formats
from torchtitan.components.data.finetuning.sample_cache import first_columns
from torchtitan.components.data.sources.source import CHAT_DATASETS, Source, resolve_source
from torchtitan.tools.errors import UserError


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
