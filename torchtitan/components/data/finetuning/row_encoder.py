"""`RowEncoder`: base class of the encoders of each kind of rows."""

from collections.abc import Sequence
from typing import ClassVar

from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    Sample,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.tokenizer import ArrayEncoder
from torchtitan.tools.digests import digest_of


class RowEncoder:
    """Encodes the rows of one kind for a `SampleCache`."""

    n_parts: ClassVar[int] = 1
    """Number of token sequences per row."""
    stored: ClassVar[tuple[str, ...]] = ()
    """Fields of `EncodedRow` besides the token sequences that a cache stores: answer, images."""
    can_fork: ClassVar[bool] = False
    """True if forked processes can use the encoder, unlike one that calls PyTorch, whose threads
    are not forked."""

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    @property
    def arrays(self) -> ArrayEncoder:
        """Encoder of rendered conversations; its ids are always the tokenizer's."""
        return self._chat.arrays

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; equal digests mean equal encodings."""
        return digest_of([type(self).__name__, self._chat.fingerprint])

    def check(self) -> None:
        """Raise `UserError` if conversations cannot be encoded; called before the first one."""
        self._chat.check()

    def encode_batch(self, samples: Sequence[Sample]) -> list[list[EncodedRow] | BrokenSample]:
        """Return the encoded samples of each row, at least one, or the error that prevents
        encoding. Raise `DifferentIds` if the caller must encode all rows again."""
        return [self._try_encode(sample) for sample in samples]

    def unread_options(self, sample: Sample) -> dict[str, str]:
        """Return the options of a sample that the template does not read, with the reason."""
        if isinstance(sample, Text):
            return {}
        conversation = sample if isinstance(sample, Conversation) else sample.prompt
        return self._chat.unread_options(conversation)

    def encode(self, sample: Sample) -> EncodedRow:
        """Encode one sample. Raise `BrokenSample` if this is impossible."""
        raise NotImplementedError

    def _try_encode(self, sample: Sample) -> list[EncodedRow] | BrokenSample:
        try:
            return [self.encode(sample)]
        except BrokenSample as error:
            return error
