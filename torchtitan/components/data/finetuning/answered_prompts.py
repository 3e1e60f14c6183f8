"""Data loader for methods that sample answers to prompts or learn from the answers of the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    Sample,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.prompts import PromptDataLoader
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.tokenizer import Tokenizer


class AnsweredPromptEncoder(RowEncoder):
    """Encodes conversations whose last turn is the answer, the only trained one."""

    can_fork = True

    def encode_batch(self, samples: Sequence[Sample]) -> list[list[EncodedRow] | BrokenSample]:
        checked = list(map(_answered, samples))
        usable = [sample for sample in checked if isinstance(sample, Conversation)]
        encoded = iter(self._chat.encode_batch(usable))
        return [
            sample if isinstance(sample, BrokenSample) else _row_of(next(encoded))
            for sample in checked
        ]


def _answered(sample: Sample) -> Conversation | BrokenSample:
    """Return a conversation whose last turn is trained, regardless of the weights in its row."""
    if not isinstance(sample, Conversation) or sample.messages[-1]["role"] != "assistant":
        return BrokenSample(
            "the row must be a conversation that ends with an answer of the assistant"
        )
    return replace(sample, trained=[])


def _row_of(parts: list[EncodedSample] | BrokenSample) -> list[EncodedRow] | BrokenSample:
    if isinstance(parts, BrokenSample):
        return parts
    return [EncodedRow((part,)) for part in parts]


class AnsweredPromptDataLoader(PromptDataLoader):
    """Conversations, as prompts with their last turns.

    A batch also has `given`: for each sample, the tokens of the whole conversation and the mask of
    its answer. `prompts` are the tokens before the answer. `rows` have no columns. `seq_len` limits
    the prompt with its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PromptDataLoader.Config):
        """Prompts with their answers."""

        def filters(self) -> FilterConfig:
            return replace(PromptDataLoader.Config.filters(self), untrained="drop")

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> RowEncoder:
            accepted = self.accepted_losses()
            return AnsweredPromptEncoder(
                ChatEncoder(tokenizer, template, "last_assistant", accepted)
            )

    config: Config
    kind = "sft"
    encoder_class = AnsweredPromptEncoder

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len + 1

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        empty = EncodedSample(np.zeros(0, np.int64), np.zeros(0, bool))
        samples = [window[0].parts[0] if window else empty for window in windows]
        prompts = [
            sample.ids[: int(np.argmax(sample.trained))].tolist() if len(sample.ids) else []
            for sample in samples
        ]
        return {
            "prompts": prompts,
            "answers": [None] * len(samples),
            "rows": [{}] * len(samples),
            "prompt_images": [[]] * len(samples),
            "given": [(sample.ids.tolist(), sample.trained.tolist()) for sample in samples],
        }
