"""Data loaders for preference methods: a chosen and a rejected answer to one prompt, or single
answers with labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    EmptySample,
    Pair,
    Sample,
    shortened,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.row_formats import Kind
from torchtitan.components.data.finetuning.samples import Windows, pack_samples
from torchtitan.components.data.plan import Packing
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("chosen", "rejected")
SEQUENCES_PER_SAMPLE = len(SIDES)
"""A window has room for both answers of the longest pair: this number times `seq_len` positions."""

_MISSING = EncodedSample(np.zeros(0, np.int64), np.zeros(0, bool))


class PairEncoder(RowEncoder):
    """Encodes pairs: the prompt with the chosen and with the rejected answer. A missing answer has
    no tokens at all."""

    n_parts = len(SIDES)
    can_fork = True

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        both = Pair(
            sample.prompt, sample.chosen or sample.rejected, sample.rejected or sample.chosen
        )
        chosen, rejected = self._chat.encode_pair(both)
        for side, part in zip(SIDES, (chosen, rejected), strict=True):
            if not part.trained[1:].any():
                raise EmptySample(f"{side} has no token to predict")
        if sample.chosen and sample.rejected and np.array_equal(chosen.ids, rejected.ids):
            raise EmptySample("chosen and rejected have the same tokens")
        return EncodedRow(
            (chosen if sample.chosen else _MISSING, rejected if sample.rejected else _MISSING)
        )


class PreferenceDataLoader(PlannedDataLoader):
    """Pairs, packed into windows without splitting; see `PlannedDataLoader` for order and position.

    A window has W = 2 `seq_len` positions and holds one or more pairs, so each sequence, the prompt
    with one of the answers, may take `seq_len` positions. A batch has `input`, `labels` (on the
    assistant's turns of the answers) and `attention` as in SFT, each sequence being a document, and
    `sequences` (B, W): a position's number of its sequence, 2 i for the chosen answer of the i-th
    pair and 2 i + 1 for the rejected one. Padding has the number 0, and no labels.

    `too_long` applies to pairs with a side longer than `seq_len` positions. `truncate_left` removes
    the same number of tokens from both sides, and drops pairs if an answer alone is too long.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Preference data."""

        too_long: Literal["drop", "truncate_left", "error"] = "drop"
        """Pairs longer than the sequence length: drop, truncate_left (shortens the prompt), or
        error."""

        packing: Packing = "ffd"
        """Packing of pairs into windows: ffd (first-fit-decreasing), multipack (equally full
        windows), or none."""

        def order_key(self) -> list[object]:
            return [*PlannedDataLoader.Config.order_key(self), self.packing]

        def packing_method(self) -> Packing:
            return self.packing

    config: Config
    kind: ClassVar[Kind] = "preference"
    encoder_class: ClassVar[type[RowEncoder]] = PairEncoder
    token_tensors: ClassVar[tuple[str, ...]] = ("input", "labels", "sequences")
    sequences_per_window = SEQUENCES_PER_SAMPLE

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        return to_batch([pack_pairs(window, seq_len * SEQUENCES_PER_SAMPLE) for window in windows])


class AnswerDataLoader(PreferenceDataLoader):
    """Single answers with a label, as for KTO: rows with a prompt, an answer and `label`, or pairs.

    The batches are like batches of pairs, but one answer of a pair may be missing: a desirable
    answer is a chosen one. They also have `mismatched_input`, `mismatched_labels` and
    `mismatched_attention`: the answers of each window with another prompt of the window,
    `n_mismatched` (B,), their number, and `n_answers` (B,), the number of answers.
    """

    kind = "rated"
    token_tensors = (
        *PreferenceDataLoader.token_tensors,
        *("mismatched_input", "mismatched_labels", "n_mismatched", "n_answers"),
    )

    def log_data(self) -> None:
        super().log_data()
        positions = np.concatenate([data.sequence_positions() for data in self.samples.sets])
        if warning := self.label_warning(positions.max(axis=0).tolist()):
            logger.warning(f"{' '.join(self.config.dataset)}: {warning}")

    @staticmethod
    def label_warning(lengths: Sequence[int]) -> str:
        if 0 not in lengths:
            return ""
        kinds = ("desirable", "undesirable") if lengths[0] else ("undesirable", "desirable")
        return "KTO also needs {1} answers, and all are {0}".format(*kinds)

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        batch = PreferenceDataLoader.collate(windows, seq_len)
        mismatched = [mismatch(window, seq_len) for window in windows]
        return batch | mismatched_batch(mismatched, seq_len * SEQUENCES_PER_SAMPLE)


class RewardEncoder(PairEncoder):
    """Encodes pairs of whole conversations with their margins. Another token follows each answer,
    so that the model sees the last one."""

    stored: ClassVar[tuple[str, ...]] = ("answer",)

    def encode(self, sample: Sample) -> EncodedRow:
        assert isinstance(sample, Pair)
        super().encode(sample)  # raises if the answers cannot be compared
        margin = sample.margin or 0
        try:
            is_number = math.isfinite(float(margin))  # cells of CSV files are text
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise BrokenSample(f"margin must be a number, not {shortened(margin)}")
        parts = [
            self._chat.encode_whole(sample.prompt, answer)
            for answer in (sample.chosen, sample.rejected)
        ]
        longer = (
            part._replace(ids=np.append(part.ids, 0), trained=np.append(part.trained, False))
            for part in parts
        )
        return EncodedRow(tuple(longer), str(margin))


class RewardDataLoader(PreferenceDataLoader):
    """Pairs for reward models, with `margins` (B, W): of the i-th pair at [:, i], as by
    `sum_answers`."""

    encoder_class = RewardEncoder
    token_tensors = ("input", "sequences", "margins")

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        return with_margins(PreferenceDataLoader.collate(windows, seq_len), windows)


def with_margins(batch: Batch, windows: Windows) -> Batch:
    """Return a batch of pairs with what `RewardDataLoader` adds to it."""
    import torch

    margins = torch.zeros(batch["input"].shape)
    for margins_W, window in zip(margins, windows, strict=True):
        margins_W[: len(window)] = torch.tensor([float(row.answer or 0) for row in window])
    return {**batch, "margins": margins}


def pack_pairs(window: Sequence[EncodedRow], n_positions: int) -> dict[str, np.ndarray]:
    """Pack the answers of all pairs as by `pack_samples`, and add `sequences`; see the loader."""
    parts = enumerate(part for row in window for part in row.parts)
    present = {number: part for number, part in parts if len(part.ids)}
    packed = pack_samples(list(present.values()), n_positions)
    numbers = np.array([*present, 0])  # the last is of padding
    return {**packed, "sequences": numbers[np.cumsum(packed["positions"] == 0) - 1]}


def sum_answers(values_BW: "Tensor", sequences_BW: "Tensor") -> "Tensor":
    """Return the sums of values over the positions of each answer, (B, W, 2), with the i-th pair at
    [:, i]."""
    zeros = values_BW.new_zeros(values_BW.shape).repeat(1, len(SIDES))
    return zeros.scatter_add(1, sequences_BW, values_BW).unflatten(1, (-1, len(SIDES)))


def mismatch(
    window: Sequence[EncodedRow], seq_len: int, *, shortens: bool = True
) -> list[EncodedRow]:
    """Return each prompt of a window, with its images, followed by an answer to another prompt.

    Each answer occurs once. If a prompt has more than half of the answers, some follow their own
    prompt, and are not trained.

    Args:
        shortens: Remove the first tokens of prompts from samples longer than `seq_len` positions.
            Otherwise, a prompt that would be too long has its own answer, which is not trained.
    """
    of_prompts: dict[bytes, list[EncodedRow]] = {}
    for side in range(len(SIDES)):
        for row in window:
            part = row.parts[side]
            if len(part.ids):
                key = np.asarray(_prompt_ids(part), np.int64).tobytes()
                of_prompts.setdefault(key, []).append(row._replace(parts=(part,)))
    answers = [(prompt, row) for prompt, rows in of_prompts.items() for row in rows]
    # The answers to a prompt are neighbors, so those that lie as far apart as the most of a prompt
    # are of two prompts.
    most = max(map(len, of_prompts.values()), default=0)
    others = [*answers[-most:], *answers[:-most]] if most else []
    result = []
    for (own, row), (another, other) in zip(answers, others, strict=True):
        part, answer = row.parts[0], other.parts[0]
        n_prompt, start = len(_prompt_ids(part)), len(_prompt_ids(answer))
        n_excess = max(0, n_prompt + len(answer.ids[start:]) - seq_len - 1)
        if n_excess and not shortens:
            result.append(row._replace(parts=(_untrained(part),)))
            continue
        prompt = slice(n_excess, n_prompt)
        ids = np.concatenate([part.ids[prompt], answer.ids[start:]])
        is_other = own != another
        trained = np.concatenate([part.trained[prompt], answer.trained[start:] & is_other])
        result.append(row._replace(parts=(EncodedSample(ids, trained),)))
    return result


def _prompt_ids(part: EncodedSample) -> np.ndarray:
    return part.ids[: int(part.trained.argmax())]


def _untrained(part: EncodedSample) -> EncodedSample:
    return part._replace(trained=np.zeros_like(part.trained))


def mismatched_batch(windows: Sequence[Sequence[EncodedRow]], n_positions: int) -> Batch:
    """Return the values that `AnswerDataLoader` adds to a batch, from the results of `mismatch`."""
    import torch

    samples = [[row.parts[0] for row in window] for window in windows]
    packed = to_batch([pack_samples(window, n_positions) for window in samples])
    n_mismatched = [sum(bool(part.trained.any()) for part in window) for window in samples]
    return {
        **{f"mismatched_{name}": values for name, values in packed.items()},
        "n_mismatched": torch.tensor(n_mismatched),
        "n_answers": torch.tensor([*map(len, samples)]),
    }
