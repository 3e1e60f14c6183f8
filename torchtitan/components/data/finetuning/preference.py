"""The data loader for preference methods: pairs of answers to one prompt, of which one is preferred."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import EmptySample, Pair, Sample
from torchtitan.components.data.finetuning.example_loader import ExampleDataLoader
from torchtitan.components.data.finetuning.examples import Example, ExampleEncoder
from torchtitan.components.data.finetuning.windows import pack_samples
from torchtitan.components.data.packing import Batch

SIDES = ("chosen", "rejected")


class PreferenceDataLoader(ExampleDataLoader):
    """Pairs for the two forward passes of a preference method; see `PlannedDataLoader` for order and position.

    A batch has, for each side, `chosen_input`, `chosen_labels`, `chosen_positions` and `rejected_…` likewise, all
    (B, T) with T = `seq_len`: row b of both sides is one pair, its prompt (with ignored labels) followed by one answer.
    The labels are those of the assistant's turns of the answer. The rest of a row is padding: a document of its own
    with ignored labels. So `model(batch["chosen_input"], batch["chosen_positions"])` needs no mask.

    `too_long` means pairs one of whose sides takes more than T positions; `truncate_left` cuts the same number of
    tokens off both, and leaves out pairs whose answers alone are longer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExampleDataLoader.Config):
        """Preference data."""

    config: Config
    kind = "preference"

    @classmethod
    def encoder(cls, encoder: ChatEncoder) -> ExampleEncoder:
        return ExampleEncoder(
            n_parts=len(SIDES),
            encode=partial(_encode, encoder),
            check=encoder.check,
            fingerprint=digest_of(["pair", encoder.fingerprint]),
        )

    @staticmethod
    def max_length(seq_len: int) -> int:
        return seq_len + 1  # the last token has nothing to predict, and takes no position

    @staticmethod
    def collate(examples: Sequence[Example | None], seq_len: int) -> Batch:
        batch: Batch = {}
        for i, side in enumerate(SIDES):
            rows = [pack_samples([example.parts[i]] if example else [], seq_len) for example in examples]
            batch |= {f"{side}_{name}": torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        return batch


def _encode(encoder: ChatEncoder, sample: Sample) -> Example:
    assert isinstance(sample, Pair)
    parts = encoder.encode_pair(sample)
    for side, part in zip(SIDES, parts, strict=True):
        if not part.trained[1:].any():
            raise EmptySample(f"{side} has no token to predict")
    return Example(parts)
