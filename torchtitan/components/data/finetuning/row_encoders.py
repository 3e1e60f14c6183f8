"""Rows of each kind to token ids: what is trained on, what is compared, what is answered."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedSample
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
    Prompt,
    Sample,
    Text,
)

SIDES = ("chosen", "rejected")


class EncodedRow(NamedTuple):
    """A row as a model sees it."""

    parts: tuple[EncodedSample, ...]
    """Its token sequences, as many for every row of a kind."""
    answer: str | None = None
    """The reference answer, where there is one."""

    @property
    def ids(self) -> np.ndarray:
        """Token ids of all parts, one behind the other, int64 (n,)."""
        return np.concatenate([part.ids for part in self.parts])

    @property
    def trained(self) -> np.ndarray:
        """Which of them the model learns to predict, bool (n,)."""
        return np.concatenate([part.trained for part in self.parts])

    @property
    def n_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(len(part.ids) for part in self.parts)

    @property
    def n_trained(self) -> int:
        """Tokens that are predicted: trained ones, of which each part's first has nothing to be predicted from."""
        return sum(int(part.trained[1:].sum()) for part in self.parts)

    @property
    def n_spelt(self) -> int:
        """How many special tokens the content spells."""
        return sum(part.n_spelt for part in self.parts)


class RowEncoder:
    """How rows of a kind are encoded: all that a `SampleCache` knows of them.

    Args:
        chat: encodes their conversations.
    """

    n_parts: ClassVar[int] = 1
    """Token sequences of a row."""
    has_answers: ClassVar[bool] = False
    """Whether rows may have reference answers."""

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; equal ones encode equally."""
        return digest_of([type(self).__name__, self._chat.fingerprint])

    def check(self) -> None:
        """Called before the first conversation is encoded; raises `UserError` where none can be."""
        self._chat.check()

    def encode_batch(self, samples: Sequence[Sample]) -> list[EncodedRow | BrokenSample]:
        """Each sample encoded, or why it cannot be."""
        return [self._encoded(sample) for sample in samples]

    def encode(self, sample: Sample) -> EncodedRow:
        """One sample; raises `BrokenSample` where it cannot be encoded."""
        raise NotImplementedError

    def _encoded(self, sample: Sample) -> EncodedRow | BrokenSample:
        try:
            return self.encode(sample)
        except BrokenSample as error:
            return error


class ConversationEncoder(RowEncoder):
    """Conversations and texts, many at a time."""

    def encode_batch(self, samples: Sequence[Sample]) -> list[EncodedRow | BrokenSample]:
        whole = [sample for sample in samples if isinstance(sample, Conversation | Text)]
        assert len(whole) == len(samples), "the format is none of samples to train on"
        encoded = self._chat.encode_batch(whole)
        return [part if isinstance(part, BrokenSample) else EncodedRow((part,)) for part in encoded]


class PairEncoder(RowEncoder):
    """Pairs: the prompt with the chosen answer, and with the rejected one."""

    n_parts = len(SIDES)

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        parts = self._chat.encode_pair(sample)
        for side, part in zip(SIDES, parts, strict=True):
            if not part.trained[1:].any():
                raise EmptySample(f"{side} has no token to predict")
        return EncodedRow(parts)


class PromptEncoder(RowEncoder):
    """Prompts, and the reference answers as they are."""

    has_answers = True

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Prompt)
        ids = self._chat.encode_prompt(sample.prompt)
        return EncodedRow((EncodedSample(ids, np.zeros(len(ids), bool)),), sample.answer)
