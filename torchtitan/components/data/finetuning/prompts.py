"""Data loader for methods that generate answers: prompts, with optional reference answers."""

import itertools
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.chat_encoding import EncodedRow, EncodedSample, RowEncoder
from torchtitan.components.data.finetuning.conversation import Prompt, Sample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.samples import Windows


def first_message(row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt of a conversation: its messages before the first answer."""
    messages = itertools.takewhile(lambda message: message["role"] != "assistant", row["messages"])
    return {"prompt": list(messages)}


class PromptRowEncoder(RowEncoder):
    """Encodes prompts; reference answer and row stay JSON text."""

    has_answers = True

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        ids = self._chat.encode_prompt(sample.prompt)
        text = json.dumps([sample.answer, sample.row], default=str)
        return EncodedRow((EncodedSample(ids, np.zeros(len(ids), bool)),), text)


class PromptDataLoader(PlannedDataLoader):
    """Prompts for generation; see `PlannedDataLoader` for order and position.

    A batch has `prompts` (B, P), token ids including the generation prompt, padded on the right to the longest prompt;
    `prompt_lengths` (B,); and `rows`, a list with all columns of each row. `prompt_ids` converts the prompts to the
    lists for `torchtitan.components.generation.generate`. A padding row is empty, has length 0, and `NO_DOCUMENT` in
    `documents`. `seq_len` limits the prompt without its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Prompts to answer."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Prompts longer than the sequence length: drop, truncate_left (keeps the end), or error."""

    config: Config
    kind = "prompt"
    encoder_class = PromptRowEncoder

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        texts = [window[0].ids if window else np.empty(0, np.int64) for window in windows]
        prompts = np.zeros((len(texts), max(map(len, texts))), np.int64)
        for padded, ids in zip(prompts, texts, strict=True):
            padded[: len(ids)] = ids
        lengths = torch.tensor([len(ids) for ids in texts])
        rows = [_answer_and_row(window[0])[1] if window else {} for window in windows]
        return {"prompts": torch.from_numpy(prompts), "prompt_lengths": lengths, "rows": rows}

    def answer(self, document: int) -> str | None:
        """Return the reference answer of a prompt, given its number in `documents`; None if there is none."""
        return None if document == NO_DOCUMENT else _answer_and_row(self.samples.sample(document))[0]


def _answer_and_row(sample: EncodedRow) -> Any:
    assert sample.answer is not None
    return json.loads(sample.answer)


def prompt_ids(batch: Batch) -> list[list[int]]:
    """Return the prompts of a batch as lists of token ids without padding; padding rows are empty."""
    lengths = batch["prompt_lengths"].tolist()
    return [ids[:length] for ids, length in zip(batch["prompts"].tolist(), lengths, strict=True)]


def prompts_in(batch: Batch) -> list[tuple[list[int], dict[str, Any], int]]:
    """Return the token ids, the row and the number in the data of each prompt of a batch, without padding rows."""
    prompts = zip(prompt_ids(batch), batch["rows"], batch["documents"][:, 0].tolist(), strict=True)
    return [prompt for prompt in prompts if prompt[2] != NO_DOCUMENT]
