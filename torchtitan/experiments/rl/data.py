"""Prompts with all columns of their rows, for rewards and rollouts."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedRow
from torchtitan.components.data.finetuning.conversation import Prompt, Sample
from torchtitan.components.data.finetuning.prompts import PromptDataLoader, PromptEncoder
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.tokenizer import Tokenizer


def first_message(row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt of a conversation: its messages before the first answer."""
    messages = itertools.takewhile(lambda message: message["role"] != "assistant", row["messages"])
    return {"prompt": list(messages)}


class PromptRowEncoder(PromptEncoder):
    """Encodes prompts; their rows stay JSON text, in the place of the reference answer."""

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        return super().encode(sample)._replace(answer=json.dumps(sample.row, default=str))


class PromptRowDataLoader(PromptDataLoader):
    """Prompts, with the JSON text of each row in the list `rows` of a batch; of a padding row, an empty string."""

    @dataclass(kw_only=True, slots=True)
    class Config(PromptDataLoader.Config):
        """Prompts to answer."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PromptRowEncoder:
            return PromptRowEncoder(ChatEncoder(tokenizer, template, "assistant"))

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        rows = [window[0].answer if window else "" for window in windows]
        return {**PromptDataLoader.collate(windows, seq_len), "rows": rows}
