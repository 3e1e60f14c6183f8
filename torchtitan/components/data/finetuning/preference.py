"""Data loader for preference methods: pairs of a chosen and a rejected answer to one prompt."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedRow, RowEncoder
from torchtitan.components.data.finetuning.conversation import EmptySample, Pair, Sample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.samples import Windows, pack_windows
from torchtitan.components.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")


class PairEncoder(RowEncoder):
    """Encodes pairs: the prompt with the chosen answer, and the prompt with the rejected answer."""

    n_parts = len(SIDES)

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        parts = self._chat.encode_pair(sample)
        for side, part in zip(SIDES, parts, strict=True):
            if not part.trained[1:].any():
                raise EmptySample(f"{side} has no token to predict")
        return EncodedRow(parts)


class PreferenceDataLoader(PlannedDataLoader):
    """Pairs for the two forward passes of a preference method; see `PlannedDataLoader` for order and position.

    A batch has `chosen_input`, `chosen_labels`, `chosen_attention` and likewise `rejected_…`, all (B, T) with T =
    `seq_len`. Row b of both sides is one pair: the prompt with ignored labels, then the answer with labels on the
    assistant's turns, then padding as a separate document with ignored labels. Since padding comes last, attention
    without documents gives the same loss.

    `too_long` applies to pairs with a side longer than T positions. `truncate_left` removes the same number of tokens
    from both sides, and drops pairs if an answer alone is too long.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Preference data."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Pairs longer than the sequence length: drop, truncate_left (shortens the prompt), or error."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PairEncoder:
            return PairEncoder(ChatEncoder(tokenizer, template, "assistant"))

    config: Config
    kind = "preference"
    token_tensors = tuple(f"{side}_{name}" for side in SIDES for name in ("input", "labels"))

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        sides = [(side, pack_windows(windows, seq_len, part)) for part, side in enumerate(SIDES)]
        return {f"{side}_{name}": values for side, packed in sides for name, values in packed.items()}
