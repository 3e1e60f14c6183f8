"""The data loader for methods that have the model answer: prompts, with reference answers where there are some."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedSample
from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt, Sample
from torchtitan.components.data.finetuning.example_loader import ExampleDataLoader
from torchtitan.components.data.finetuning.examples import Example, ExampleEncoder
from torchtitan.components.data.packing import NO_DOCUMENT, Batch
from torchtitan.tools.errors import UserError


class PromptDataLoader(ExampleDataLoader):
    """Prompts for generation; see `PlannedDataLoader` for order and position.

    A batch has `prompts` (B, P), token ids that end with the beginning of the assistant's turn, padded on the right to
    the longest prompt of the batch, and `prompt_lengths` (B,), their numbers of tokens: padding on the right is where
    the answer goes, and positions count from the first column. `prompt_ids` gives the lists that
    `torchtitan.components.generation.generate` takes. A row that only fills up the last batch has the length 0 and
    `NO_DOCUMENT` in `documents`.

    `seq_len` is the most tokens of a prompt, without its answer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExampleDataLoader.Config):
        """Prompts to answer."""

    config: Config
    kind = "prompt"

    @classmethod
    def encoder(cls, encoder: ChatEncoder) -> ExampleEncoder:
        return ExampleEncoder(
            n_parts=1,
            encode=partial(_encode, encoder),
            check=encoder.check,
            fingerprint=digest_of(["prompt", encoder.fingerprint]),
        )

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len

    @staticmethod
    def collate(examples: Sequence[Example | None], seq_len: int) -> Batch:
        rows = [example.parts[0].ids if example else np.empty(0, np.int64) for example in examples]
        prompts = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for padded, ids in zip(prompts, rows, strict=True):
            padded[: len(ids)] = ids
        return {"prompts": torch.from_numpy(prompts), "prompt_lengths": torch.tensor([len(ids) for ids in rows])}

    def answer(self, document: int) -> str | None:
        """The reference answer to a prompt, by its number in `documents`; None: it has none."""
        if document == NO_DOCUMENT:
            return None
        source, index = self.samples.locate(document)
        return self.samples.sets[source].answer(index)


def prompt_ids(batch: Batch) -> list[list[int]]:
    """The prompts of a batch as lists of token ids, without padding; those of filled-up rows are empty."""
    lengths = batch["prompt_lengths"].tolist()
    return [ids[:length] for ids, length in zip(batch["prompts"].tolist(), lengths, strict=True)]


def _encode(encoder: ChatEncoder, sample: Sample) -> Example:
    assert isinstance(sample, Prompt)
    try:
        ids = encoder.encode_prompt(sample.prompt)
    except UserError as error:  # the template is there, and does not take this conversation
        raise BrokenSample(str(error)) from error
    return Example((EncodedSample(ids, np.zeros(len(ids), bool)),), sample.answer)
