"""The data loader for supervised fine-tuning: rows of tables as conversations, packed whole into windows."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

from torchtitan.components.chat_template import ChatTemplate, load_chat_template
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, TrainOn
from torchtitan.components.data.finetuning.filters import Filters
from torchtitan.components.data.finetuning.fitting import FittedSamples, TooLong
from torchtitan.components.data.finetuning.options import parse_schedule, parse_token_range
from torchtitan.components.data.finetuning.planned_loader import PREFETCHED_BATCHES, PlannedDataLoader
from torchtitan.components.data.finetuning.policies import Policy, Rules
from torchtitan.components.data.finetuning.sample_cache import SampleCache, open_sample_cache
from torchtitan.components.data.finetuning.windows import SampleSets, WindowDataset
from torchtitan.components.data.plan import Packing, Planner, ShuffleSampler
from torchtitan.components.data.summary import DataSummary, SetSummary
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


class SFTDataLoader(PlannedDataLoader):
    """Conversations, instructions or texts, tokenized whole, packed whole, and trained where the mask says so.

    A sample of n tokens takes n - 1 positions: its inputs are all tokens but the last, its labels all but the first, or
    `IGNORE_INDEX` where a token is not trained. It is a document of its own, and so is the padding at a window's end.
    The batches' `documents` (B, M) are the numbers of the samples in each window, in their order, counted over all
    data sets, with `NO_DOCUMENT` behind them. See `PlannedDataLoader` for order and position.

    Args:
        config: what to read.
        tokenizer: encodes the conversations; its folder has the chat template, unless the configuration names one.
        seq_len: positions per window, T.
        local_batch_size: windows per batch and rank, B.
        dp_rank: this process's place among the data-parallel ranks.
        dp_world_size: number of data-parallel ranks.
        seed: decides the order.
        epochs: how often the data is read; the last batch is filled up with windows of padding. With weights it ends
            when the first data set has been read so often. None: without end.
        global_batch_size: windows of one training step, all ranks together, for the schedule of weights; None: one
            batch of each rank.

    Raises:
        UserError: the data cannot be used, or a number is out of range.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedDataLoader.Config):
        """Fine-tuning data."""

        dataset: list[str] = field(default_factory=lambda: ["chats"])
        """What to read, one or several: `chats` (embedded), a registered name, or a local path: a file (json, jsonl,
        csv, parquet, txt, md; .gz or .zst of these), a folder, a glob pattern, or a folder saved by the library
        datasets."""
        train_on: TrainOn = "assistant"
        """Which turns are trained: the assistant's, the assistant's last one, or all. A row's own weights win."""
        too_long: TooLong = "drop"
        """Samples beyond the sequence length: drop, truncate_left (keeps the end), truncate_right, or error."""
        untrained: Policy = "drop"
        """Samples none of whose tokens is trained: drop or error."""
        min_tokens: int = 0
        """Fewest tokens of a sample; shorter ones are dropped."""
        max_tokens: int | None = None
        """Most tokens of a sample, whatever the sequence length; longer ones are dropped."""
        token_range: str = ""
        """Token ids that may occur, LOW-HIGH, both included; samples with others are dropped. Empty: all."""
        max_repetition: float = 1.0
        """Largest share of a sample's n-grams of tokens that occurred before in it; more repetitive ones are dropped.
        1: none."""
        repetition_ngram: int = 10
        """Tokens per n-gram."""
        packing: Packing = "ffd"
        """How samples share windows: ffd (first-fit-decreasing), multipack (equally full windows), or none."""
        pack_chunk: int = 8192
        """Samples of a data set that are packed together, after they have been shuffled."""
        weights: list[float] = field(default_factory=list)
        """Share of each data set in the tokens; empty: all are read equally often."""
        weight_schedule: list[str] = field(default_factory=list)
        """Other weights from a step on: "500: 0.2 0.8"."""
        max_epochs: list[float] = field(default_factory=list)
        """How often each data set may be read. Empty: with weights and no training.epochs once, else as often as the
        run needs."""

        def validate(self) -> None:
            """Raise `UserError` for a value out of range; looks at no data."""
            PlannedDataLoader.Config.validate(self)
            if self.pack_chunk < 1:
                raise UserError(f"--dataloader.pack_chunk must be at least 1 sample, not {self.pack_chunk}")
            if self.weight_schedule and not self.weights:
                raise UserError("--dataloader.weight_schedule needs --dataloader.weights, those before its first step")
            parse_schedule(self.weight_schedule)
            for name, values in (("weights", self.weights), ("max_epochs", self.max_epochs)):
                if values and len(values) != len(self.dataset):
                    raise UserError(
                        f"--dataloader.{name} has {len(values)} values for {len(self.dataset)} data sets; give one each"
                    )
            if any(not limit > 0 for limit in self.max_epochs):
                raise UserError(f"--dataloader.max_epochs must be above 0, not {min(self.max_epochs):g}")
            self.rules()

        def rules(self) -> Rules:
            """Which rows become samples; raises `UserError` for limits that mean nothing."""
            filters = Filters(
                min_tokens=self.min_tokens,
                max_tokens=self.max_tokens,
                token_range=parse_token_range(self.token_range),
                max_repetition=self.max_repetition,
                repetition_ngram=self.repetition_ngram,
            )
            return Rules(empty=self.empty, broken=self.broken, untrained=self.untrained, filters=filters)

        def open_caches(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[SampleCache]:
            encoder = ChatEncoder(tokenizer, template, self.train_on)
            return [
                open_sample_cache(source, row_format, encoder, self.rules(), self.cache_dir)
                for source, row_format in self.rows()
            ]

        def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
            """The template that is named, else the model's own; None where it has none, since running text needs none,
            and conversations are then refused when there is one."""
            if not self.chat_template and (not tokenizer.folder or load_chat_template(tokenizer.folder) is None):
                return None
            return PlannedDataLoader.Config.find_template(self, tokenizer)

        def for_validation(self, dataset: str) -> "SFTDataLoader.Config | None":
            """As the other loaders, with all data sets read equally often."""
            config = PlannedDataLoader.Config.for_validation(self, dataset)
            return config and dataclasses.replace(config, weights=[], weight_schedule=[], max_epochs=[])

    config: Config
    kind = "sft"
    samples: SampleSets

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        global_batch_size: int | None = None,
    ):
        super().__init__(config, tokenizer=tokenizer, seq_len=seq_len, local_batch_size=local_batch_size, epochs=epochs)
        caches = config.open_caches(tokenizer, self.template)
        fitted = [
            FittedSamples(cache, seq_len, config.too_long, config.untrained, name)
            for name, cache in zip(config.dataset, caches, strict=True)
        ]
        self.samples = SampleSets(config.dataset, fitted)
        # Other policies give other samples; the weights may change from one position to the next.
        of_order = [
            seq_len,
            config.too_long,
            config.untrained,
            config.packing,
            config.pack_chunk,
            config.sampler.to_dict(),
        ]
        per_pass = local_batch_size * dp_world_size
        self.start(
            self._plan(seed, epochs, per_pass, global_batch_size or per_pass),
            WindowDataset(self.samples, seq_len),
            fingerprint=digest_of([[cache.fingerprint for cache in caches], of_order]),
            local_batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        self._log_data()

    def _plan(self, seed: int, epochs: int | None, windows_per_pass: int, windows_per_step: int) -> Planner:
        config, sets = self.config, self.samples.sets
        samplers = [config.sampler.build(n_samples=of.n_samples, seed=seed + i) for i, of in enumerate(sets)]
        self.needs_sample_losses = any(sampler.needs_sample_losses for sampler in samplers)
        limits: list[float | None] = [*config.max_epochs] or [None] * len(sets)
        if config.weights and not config.max_epochs and epochs is None:  # epochs are an end by themselves
            limits = [1.0] * len(sets)
        return Planner(
            self.samples.positions,
            self._seq_len,
            samplers,
            packing=config.packing,
            chunk=config.pack_chunk,
            weights=config.weights or None,
            schedule=parse_schedule(config.weight_schedule),
            windows_per_step=windows_per_step,
            max_epochs=limits,
            names=config.dataset,
            seed=seed,
            epochs=epochs,
            ahead=PREFETCHED_BATCHES * config.num_workers * windows_per_pass,
        )

    def summary(self, n_samples: int) -> DataSummary:
        if self.n_samples is not None:
            n_samples = min(n_samples, self.n_samples)
        epochs, limits = self._planner.epochs_after(n_samples), self._planner.max_epochs
        sets = [
            SetSummary(name=name, report=of.report, lengths=of.all_lengths, epochs=times, max_epochs=limit)
            for name, of, times, limit in zip(self.samples.names, self.samples.sets, epochs, limits, strict=True)
        ]
        return DataSummary(
            sets=sets,
            max_length=self._seq_len + 1,
            windows_per_epoch=self._windows_per_epoch,
            packing_efficiency=self.packing_efficiency,
            follows_seed=not self._planner.is_adaptive,
        )

    def check_repetitions(self, n_samples: int) -> None:
        self._planner.check_repetitions(n_samples)
        if not self.config.weights and self._planner.epochs is None:
            times = n_samples / self._windows_per_epoch
            shown = f"{times:.1f}" if times >= 1 else f"{times:.2g}"
            logger.info(f"the run reads {' '.join(self.config.dataset)} {shown} times")

    @cached_property
    def _windows_per_epoch(self) -> int:
        """Windows that all data makes when it is read once, each data set by itself."""
        positions, config = self.samples.positions, self.config
        if (of_epochs := self._planner.windows_of_epochs) is not None and not config.weights:
            return of_epochs[0]
        samplers = [ShuffleSampler.Config().build(n_samples=len(of_set), seed=0) for of_set in positions]
        epoch = Planner(positions, self._seq_len, samplers, packing=config.packing, chunk=config.pack_chunk, epochs=1)
        return sum(1 for _ in epoch)

    @property
    def packing_efficiency(self) -> float:
        """The share of the windows' positions that samples take, in an epoch; the rest is padding."""
        n_positions = sum(int(of_set.sum()) for of_set in self.samples.positions)
        return n_positions / (self._windows_per_epoch * self._seq_len)

    def _log_data(self) -> None:
        for line in self.samples.report_lines():
            logger.info(line)
        logger.info(
            f"packing: {self.packing_efficiency:.1%} of the windows' {self._seq_len:,} positions are filled, "
            f"{self.samples.trained_fraction:.1%} of these are trained"
        )
