"""Data loader for methods that generate answers: prompts, with optional reference answers."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedRow, EncodedSample, RowEncoder
from torchtitan.components.data.finetuning.conversation import Prompt, Sample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.tokenizer import Tokenizer


class PromptEncoder(RowEncoder):
    """Encodes prompts; reference answers stay text."""

    has_answers = True

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        ids = self._chat.encode_prompt(sample.prompt)
        return EncodedRow((EncodedSample(ids, np.zeros(len(ids), bool)),), sample.answer)


class PromptDataLoader(PlannedDataLoader):
    """Prompts for generation; see `PlannedDataLoader` for order and position.

    A batch has `prompts` (B, P), token ids including the generation prompt, padded on the right to the longest prompt,
    and `prompt_lengths` (B,). `prompt_ids` converts them to the lists for `torchtitan.components.generation.generate`.
    A padding row has length 0 and `NO_DOCUMENT` in `documents`. `seq_len` limits the prompt without its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Prompts to answer."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Prompts longer than the sequence length: drop, truncate_left (keeps the end), or error."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PromptEncoder:
            return PromptEncoder(ChatEncoder(tokenizer, template, "assistant"))

    config: Config
    kind = "prompt"

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        rows = [window[0].ids if window else np.empty(0, np.int64) for window in windows]
        prompts = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for padded, ids in zip(prompts, rows, strict=True):
            padded[: len(ids)] = ids
        return {"prompts": torch.from_numpy(prompts), "prompt_lengths": torch.tensor([len(ids) for ids in rows])}

    def answer(self, document: int) -> str | None:
        """Return the reference answer of a prompt, given its number in `documents`; None if there is none."""
        return None if document == NO_DOCUMENT else self.samples.sample(document).answer


def prompt_ids(batch: Batch) -> list[list[int]]:
    """Return the prompts of a batch as lists of token ids without padding; padding rows are empty."""
    lengths = batch["prompt_lengths"].tolist()
    return [ids[:length] for ids, length in zip(batch["prompts"].tolist(), lengths, strict=True)]
