"""Data loader for methods that generate answers: prompts, with optional reference answers."""

import itertools
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.chat_encoding import (
    EncodedRow,
    EncodedSample,
    RowEncoder,
)
from torchtitan.components.data.finetuning.conversation import Prompt, Sample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.samples import Windows


def first_message(row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt of a conversation: its messages before the first answer."""
    messages = itertools.takewhile(lambda message: message["role"] != "assistant", row["messages"])
    return {"prompt": list(messages)}


class PromptRowEncoder(RowEncoder):
    """Encodes prompts; reference answer and row stay JSON text."""

    stored = ("answer",)

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        ids = self._chat.encode_prompt(sample.prompt)
        text = json.dumps([sample.answer, sample.row], default=str)
        return EncodedRow((EncodedSample(ids, np.zeros(len(ids), bool)),), text)


class PromptDataLoader(PlannedDataLoader):
    """Prompts for generation; see `PlannedDataLoader` for order and position.

    A batch has lists with an element for each sample: `prompts`, the token ids including the
    generation prompt, as `torchtitan.components.generation.generate` takes them; `answers`, the
    reference answer or None; and `rows`, all columns. A padding sample has an empty prompt, and
    `NO_DOCUMENT` in `documents`. `seq_len` limits the prompt without its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Prompts to answer."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Prompts longer than the sequence length: drop, truncate_left (keeps the end), or
        error."""

    config: Config
    kind = "prompt"
    encoder_class = PromptRowEncoder

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        texts = [json.loads(window[0].answer or "") if window else (None, {}) for window in windows]
        answers, rows = map(list, zip(*texts, strict=True))
        prompts = [window[0].ids.tolist() if window else [] for window in windows]
        return {"prompts": prompts, "answers": answers, "rows": rows}


def prompts_in(batch: Batch) -> list[tuple[list[int], dict[str, Any], int]]:
    """Return the token ids, the row and the number in the data of each prompt of a batch, without
    padding."""
    prompts = zip(batch["prompts"], batch["rows"], batch["documents"][:, 0].tolist(), strict=True)
    return [prompt for prompt in prompts if prompt[2] != NO_DOCUMENT]
