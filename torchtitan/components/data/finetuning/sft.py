"""Data loader for supervised fine-tuning: conversations and texts, packed into windows."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

from torchtitan.components.chat_template import ChatTemplate, load_chat_template
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    Sample,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.filters import FilterConfig, Policy
from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
from torchtitan.components.data.finetuning.row_encoder import RowEncoder
from torchtitan.components.data.finetuning.sample_texts import TrainOn
from torchtitan.components.data.plan import Packing, Planner, PlanOptions, Sampler
from torchtitan.components.data.plan.mixture import check_per_dataset, check_weights
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import redact

_PLAIN_TEXT = (".txt", ".md")


class ConversationEncoder(RowEncoder):
    """Encodes conversations and texts in batches."""

    can_fork = True

    def encode_batch(self, samples: Sequence[Sample]) -> list[list[EncodedRow] | BrokenSample]:
        supported = [sample for sample in samples if isinstance(sample, Conversation | Text)]
        assert len(supported) == len(samples), "samples must be conversations or texts"
        encoded = self._chat.encode_batch(supported)
        return [
            parts if isinstance(parts, BrokenSample) else [EncodedRow((part,)) for part in parts]
            for parts in encoded
        ]


class SFTDataLoader(PlannedDataLoader):
    """Conversations, instructions or texts, packed without splitting, with labels for trained
    tokens only.

    A sample of n tokens takes n - 1 positions: its inputs are all tokens except the last, its
    labels all except the first, or `IGNORE_INDEX` for untrained tokens. Each sample is a separate
    document, as is the padding of a window. With weights, training ends as soon as one dataset has
    been read `epochs` times. Only the weight schedule uses `global_batch_size`. See
    `PlannedDataLoader` for arguments, order and position.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Fine-tuning data."""

        dataset: list[str] = field(default_factory=lambda: ["chats"])
        """Datasets, each `chats` (built in), a registered name, or a local path: a file (json,
        jsonl, csv, parquet, txt, md, optionally .gz or .zst), a folder, a glob pattern, or a folder
        written by `datasets.save_to_disk`; or a dataset on the Hugging Face Hub,
        `org/name[:config][@revision][split]`."""
        train_on: TrainOn = "assistant"
        """Turns to train on: assistant (all of its turns), last_assistant, or all. Weights in a row
        take precedence."""
        untrained: Policy = "drop"
        """Samples without trained tokens: drop or error."""
        min_tokens: int = 0
        """Minimum tokens of a sample; shorter samples are dropped."""
        max_tokens: int | None = None
        """Maximum tokens of a sample, independent of the sequence length; longer samples are
        dropped."""
        token_range: str = ""
        """Range of allowed token ids, LOW-HIGH (inclusive); samples with other ids are dropped.
        Empty: all."""
        max_repetition: float = 1.0
        """Maximum fraction of repeated token n-grams in a sample; samples with more are dropped. 1:
        no limit."""
        repetition_ngram: int = 10
        """Tokens per n-gram, for max_repetition."""
        packing: Packing = "ffd"
        """Packing of samples into windows: ffd (first-fit-decreasing), multipack (equally full
        windows), or none."""
        pack_chunk: int = 8192
        """Samples of a dataset that are packed at a time, after shuffling."""
        weights: list[float] = field(default_factory=list)
        """Relative share of each dataset in the tokens; empty: read all datasets equally often."""
        weight_schedule: list[str] = field(default_factory=list)
        """Steps from which new weights apply: "500: 0.2 0.8"."""
        max_epochs: list[float] = field(default_factory=list)
        """Maximum epochs of each dataset; empty: 1 with weights and without training.epochs,
        otherwise no limit."""

        def prepare(self, *, tokenizer: Tokenizer) -> None:
            PlannedDataLoader.Config.prepare(self, tokenizer=tokenizer)
            for name in self.dataset:
                if name.endswith(_PLAIN_TEXT):
                    logger.warning(
                        "%s is plain text, without questions and answers, and is trained on in "
                        "full; for running text, use a configuration such as --config pretrain",
                        redact(name),
                    )

        def validate(self) -> None:
            PlannedDataLoader.Config.validate(self)
            require(
                self.pack_chunk >= 1,
                "--dataloader.pack_chunk",
                self.pack_chunk,
                "at least 1 sample",
            )
            if self.weight_schedule and not self.weights:
                raise UserError(
                    "--dataloader.weight_schedule also needs --dataloader.weights, the initial "
                    "weights"
                )
            if self.weights:
                check_weights("weights", self.weights, len(self.dataset))
            for _, weights in parse_schedule(self.weight_schedule):
                check_weights("weight_schedule", weights, len(self.dataset))
            if self.max_epochs:
                check_per_dataset("max_epochs", self.max_epochs, len(self.dataset))
            for limit in self.max_epochs:
                require(limit > 0, "--dataloader.max_epochs", f"{limit:g}", "above 0")
            self.filters()

        def filters(self) -> FilterConfig:
            return dataclasses.replace(
                PlannedDataLoader.Config.filters(self),
                untrained=self.untrained,
                min_tokens=self.min_tokens,
                max_tokens=self.max_tokens,
                token_range=parse_token_range(self.token_range),
                max_repetition=self.max_repetition,
                repetition_ngram=self.repetition_ngram,
            )

        def dataset_weights(self) -> Sequence[float]:
            return self.weights

        def packing_method(self) -> Packing:
            return self.packing

        def packing_chunk(self) -> int:
            return self.pack_chunk

        def encoder(
            self, tokenizer: Tokenizer, template: ChatTemplate | None
        ) -> ConversationEncoder:
            return ConversationEncoder(
                ChatEncoder(tokenizer, template, self.train_on, self.accepted_losses())
            )

        def identity(self) -> dict[str, object]:
            """Return the identity of the data and of the trained turns."""
            return PlannedDataLoader.Config.identity(self) | {"dataloader.train_on": self.train_on}

        def order_key(self) -> list[object]:  # without weights, which a resumed run may change
            return [
                self.too_long,
                self.untrained,
                self.packing,
                self.pack_chunk,
                self.sampler.to_dict(),
            ]

        def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
            """Return the configured template, by default the model's; None for a model without a
            template (for plain text)."""
            if not self.chat_template and (
                not tokenizer.folder or load_chat_template(tokenizer.folder) is None
            ):
                return None
            return PlannedDataLoader.Config.find_template(self, tokenizer)

        def for_validation(self, dataset: str) -> "SFTDataLoader.Config | None":
            """Return the base class's config without weights: all datasets are read equally
            often."""
            config = PlannedDataLoader.Config.for_validation(self, dataset)
            if config is None:
                return None
            return dataclasses.replace(config, weights=[], weight_schedule=[], max_epochs=[])

    config: Config
    kind = "sft"
    sequences_per_window = 1

    def plan(
        self,
        samplers: list[Sampler],
        *,
        epochs: int | None,
        windows_per_step: int,
        **options: Unpack[PlanOptions],
    ) -> Planner:
        config, n_sets = self.config, len(self.samples.sets)
        limits: list[float | None] = [*config.max_epochs] or [None] * n_sets
        # otherwise, epochs limit the run
        if config.weights and not config.max_epochs and epochs is None:
            limits = [1.0] * n_sets
        options["weights"] = config.weights or None
        options["schedule"] = parse_schedule(config.weight_schedule)
        options["max_epochs"] = limits
        return super().plan(samplers, epochs=epochs, windows_per_step=windows_per_step, **options)

    def set_weights(self, weights: Sequence[float]) -> None:
        self.close()  # windows planned ahead have the old weights
        self._planner.set_weights(weights)
        self._position = self._planner.snapshot()

    def check_repetitions(self, n_samples: int) -> None:
        self._planner.check_repetitions(n_samples)
        if not self.config.weights and self._planner.epochs is None:
            times = n_samples / self.windows_per_epoch
            shown = f"{times:.1f}" if times >= 1 else f"{times:.2g}"
            logger.info(f"the run reads {' '.join(self.config.dataset)} {shown} times")

    @property
    def packing_efficiency(self) -> float | None:
        n_positions = sum(int(lengths.sum()) for lengths in self.samples.positions)
        return n_positions / (self.windows_per_epoch * self._layout.seq_len)

    def log_data(self) -> None:
        super().log_data()
        efficiency, trained = self.packing_efficiency, self.samples.trained_fraction
        if efficiency is None:
            logger.info(f"no packing: {trained:.1%} of the samples' positions are trained")
            return
        logger.info(
            f"packing: {efficiency:.1%} of the windows' {self._layout.seq_len:,} positions are "
            f"filled, {trained:.1%} of these are trained"
        )


def parse_token_range(text: str) -> tuple[int, int] | None:
    """Parse `LOW-HIGH`; None for an empty text. Raise `UserError` for other forms."""
    if not text:
        return None
    low, dash, high = text.partition("-")
    if not (
        dash and low.strip().isdecimal() and high.strip().isdecimal() and int(low) <= int(high)
    ):
        raise UserError(
            f"--dataloader.token_range must have the form LOW-HIGH, such as 0-31999, not {text!r}"
        )
    return int(low), int(high)


def parse_schedule(entries: list[str]) -> list[tuple[int, list[float]]]:
    """Parse `["500: 0.2 0.8", …]` into pairs of step and weights. Raise `UserError` for other
    forms."""
    schedule = []
    for entry in entries:
        step, colon, weights = entry.partition(":")
        try:
            schedule.append((int(step), [float(weight) for weight in weights.split()]))
        except ValueError:
            colon = ""
        if not colon:
            raise UserError(
                "--dataloader.weight_schedule must have entries such as '500: 0.2 0.8', not "
                f"{entry!r}"
            )
    return schedule
