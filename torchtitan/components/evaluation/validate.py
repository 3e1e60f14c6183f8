"""Validation: the loss on held-out data, defined like the training loss."""

import contextlib
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.losses.loss import (
    IGNORE_INDEX,
    CrossEntropyLoss,
    CrossEntropySum,
    Measures,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.config.configurable import builds
from torchtitan.config.ranges import check_ranges
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.process_group import on_all_ranks, sum_over_ranks
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_HINT = "(docs/metrics.md)"

CLOCK_METRICS = ("validation_tokens_per_second", "validation_time")
"""Metrics of `Validator.validate` by the clock of each rank."""


class Validator(Configurable):
    """Measures the mean loss over all valid tokens of the validation data on all ranks.

    Args:
        config: frequency and number of batches.
        model_parts: models, set to evaluation mode during validation.
        dataloaders: name → loader that yields a validation set once; "" is the name of a single
            set.
        tokenizer: decodes the data to count bytes. None: the loss is not per token, so bits per
            byte are not reported.
        batches_per_step: local batches in one rank's share of a global batch.
        sums_of_batch: batch → this rank's part of the summed loss, a scalar on the device, and of
            its weight, the number of valid tokens.
        loss: the loss that `sums_of_batch` calls; it also provides plain cross entropy, for bits
            per byte. None: bits per byte are not reported.
        local_addend: a scalar → this rank's term in the sum over all ranks.
        measures: additional means measured by `sums_of_batch`, reported as `validation_NAME`.
        counts_bytes: count the bytes of this rank's samples; True on one of the ranks with the same
            samples.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Validation."""

        enable: bool = False
        """Validate during training and at its end."""

        dataset: list[str] = field(default_factory=list)
        """Validation sets, each as in dataloader.dataset or as name=dataset; multiple sets are
        reported by name. None: the validation split of the training data, if it has one."""

        freq: int = 100
        """Training steps between validations."""

        steps: int = -1
        """Global batches per validation and set, independent of the number of ranks; -1: all
        data."""

        at_start: bool = False
        """Also validate before the first step."""

        @builds(lambda: Validator)
        def build(self) -> object:
            """Build the validator of a run."""

        def validate(self) -> None:
            check_ranges("validator", self)
            self.named_datasets()

        def named_datasets(self) -> dict[str, str]:
            """Return name → dataset of each set. The default name is the file's or folder's, or ""
            for a single set; "" → "" is the validation split of the training data. Raise
            `UserError` for duplicate names."""
            if not self.dataset:
                return {"": ""}
            sets = [
                split_name(text, default="" if len(self.dataset) == 1 else None)
                for text in self.dataset
            ]
            for name, count in Counter(name for name, _ in sets).items():
                if count > 1:
                    raise UserError(
                        f"--validator.dataset has {count} sets named '{name}'; name them "
                        f"explicitly ({name}2=...)"
                    )
            return dict(sets)

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        model_parts: Sequence[nn.Module],
        dataloaders: Mapping[str, BaseDataLoader],
        tokenizer: Tokenizer | None,
        batches_per_step: int,
        sums_of_batch: Callable[[Batch], tuple[Tensor, Tensor | int]],
        loss: Any = None,
        local_addend: Callable[[Tensor], Tensor] = lambda value: value,
        measures: Measures | None = None,
        counts_bytes: bool = True,
    ):
        super().__init__(config)
        self.model_parts = model_parts
        self.tokenizer = tokenizer
        self.sets = {name: _Set(loader) for name, loader in dataloaders.items()}
        self.max_batches = config.steps * batches_per_step if config.steps != -1 else None
        self.sums_of_batch = sums_of_batch
        self.loss = loss if isinstance(loss, CrossEntropyLoss) else None
        self.local_addend = local_addend
        self._reports_bits = tokenizer is not None and self.loss is not None
        if tokenizer and loss is not None and self.loss is None:
            logger.warning(
                f"no validation_bits_per_byte: {type(loss).__name__} is not a CrossEntropyLoss "
                f"{_HINT}"
            )
        self.measures = measures or Measures((), device=torch.device("cpu"))
        self.counts_bytes = counts_bytes

    def is_due(self, step: int, *, last: bool) -> bool:
        return last or step % self.config.freq == 0

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Run the validation and return its metrics.

        These are `validation_loss`, the mean per valid token of all sets (NaN without valid
        tokens); `validation_bits_per_byte`, the plain cross entropy in bits per byte of predicted
        text for any loss, or nothing if the loss does not give it; both for each named set, as
        `validation_loss/NAME`; `validation_time` in seconds; and `validation_tokens_per_second`,
        over all ranks.
        """
        start_time = time.perf_counter()
        for part in self.model_parts:
            part.eval()
        sums_of_sets = torch.stack([self._sum_set(data) for data in self.sets.values()])
        for part in self.model_parts:
            free_gathered_weights(part)
            part.train()
        sums_of_sets = sum_over_ranks(sums_of_sets)
        self._check_cross_entropy(sums_of_sets.sum(dim=0))
        metrics = self._means(sums_of_sets.sum(dim=0))
        for name, sums in zip(self.sets, sums_of_sets, strict=True):
            if name:
                metrics |= {f"{key}/{name}": value for key, value in self._means(sums).items()}
        seconds = time.perf_counter() - start_time
        if self.tokenizer:
            metrics["validation_tokens_per_second"] = sums_of_sets[:, 1].sum().item() / seconds
        return {**metrics, "validation_time": seconds}

    def measured_names(self) -> list[str]:
        """Return the names of the metrics that `validate` omits if a validation has nothing to
        measure."""
        sets = ["", *(f"/{name}" for name in self.sets if name)]
        return [f"validation_{name}{of_set}" for name in self.measures.names for of_set in sets]

    def _sum_set(self, data: "_Set") -> Tensor:
        """Return this rank's part of a set's summed loss, weight, bytes, cross entropy in nats,
        number of its tokens, and measures, float64 (5 + 2 n,)."""
        self.measures.take()
        data.loader.load_state_dict(data.initial_state)
        # float64, so that the mean does not depend on the order of batches or the number of ranks.
        totals = torch.zeros(2, dtype=torch.float64)
        plain = torch.zeros(2, dtype=torch.float64)
        n_bytes = 0
        for batch in itertools.islice(data.loader, self.max_batches):
            # Streams may end at different times on different ranks; exhausted ranks get batches
            # without labels.
            if data.loader.n_samples is None and on_all_ranks(data.loader.exhausted):
                break
            of_batch = CrossEntropySum()
            with (
                self.loss.adding_cross_entropy(of_batch) if self.loss else contextlib.nullcontext()
            ):
                loss, weight = self.sums_of_batch(batch)
            totals += torch.tensor([float(loss), float(weight)], dtype=torch.float64)
            local = (
                self.local_addend(torch.as_tensor(x)) for x in (of_batch.nats, of_batch.n_tokens)
            )
            plain += torch.tensor([*map(float, local)], dtype=torch.float64)
            if data.n_bytes is None and self.counts_bytes and self.tokenizer:
                n_bytes += count_bytes(batch, self.tokenizer)
        # Counted only once, since the data is the same each time.
        data.n_bytes = n_bytes if data.n_bytes is None else data.n_bytes
        byte_count = torch.tensor([data.n_bytes], dtype=torch.float64)
        return torch.cat([totals, byte_count, plain, self.measures.take().to("cpu", torch.float64)])

    def _check_cross_entropy(self, sums: Tensor) -> None:
        """Skip bits per byte, with a warning, if the cross entropy does not cover the valid tokens
        exactly once, because a subclass does not call its base class, or calls it more than once
        for a token."""
        read = _read_sums(sums)
        if self._reports_bits and read.n_tokens != read.weight:
            self._reports_bits = False
            logger.warning(
                f"no validation_bits_per_byte: {type(self.loss).__name__} gave the cross entropy "
                f"of {read.n_tokens:.0f} tokens, not of the {read.weight:.0f} valid ones {_HINT}"
            )

    def _means(self, sums: Tensor) -> dict[str, float]:
        read = _read_sums(sums)
        means = {"validation_loss": read.loss / read.weight if read.weight else math.nan}
        if self._reports_bits:
            bits = read.nats / math.log(2)
            means["validation_bits_per_byte"] = bits / read.n_bytes if read.n_bytes else math.nan
        measured = self.measures.means(read.measured)
        return means | {f"validation_{name}": value for name, value in measured.items()}

    def close(self) -> None:
        for data in self.sets.values():
            data.loader.close()


class _Sums(NamedTuple):
    loss: float
    weight: float
    n_bytes: float
    nats: float
    """Cross entropy of `n_tokens` tokens."""
    n_tokens: float
    measured: list[float]


def _read_sums(sums: Tensor) -> _Sums:
    """Read what `Validator._sum_set` returns."""
    numbers = sums.tolist()
    return _Sums(
        loss=numbers[0],
        weight=numbers[1],
        n_bytes=numbers[2],
        nats=numbers[3],
        n_tokens=numbers[4],
        measured=numbers[5:],
    )


class _Set:
    def __init__(self, loader: BaseDataLoader):
        self.loader = loader
        self.initial_state = loader.state_dict()
        # bytes of predicted text on this rank, set by the first validation
        self.n_bytes: int | None = None


def split_name(text: str, default: str | None) -> tuple[str, str]:
    """Return the name and dataset of `name=dataset`; without a name, use `default` or the last part
    of the path."""
    if match := re.fullmatch(r"([\w.-]+)=(.+)", text):
        return match[1], match[2]
    return Path(text).name if default is None else default, text


def count_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes in the text of a batch's valid labels, without special tokens. A
    character split by the end of a sample, or of its valid part, counts as 3 bytes on either
    side."""
    attention = batch.get("attention", AttentionMetadata.of_rows(*batch["input"].shape))
    total = 0
    inputs, labels = (
        batch[name].flatten().split(attention.lengths) for name in ("input", "labels")
    )
    for of_inputs, of_labels in zip(inputs, labels, strict=True):
        total += _count_document_bytes(of_inputs, of_labels, tokenizer)
    return total


def _count_document_bytes(inputs: Tensor, labels: Tensor, tokenizer: Tokenizer) -> int:
    """Count the bytes of one document. For each run of valid labels, decode the text up to its end
    and subtract the preceding text, since decoding depends on it (some tokenizers drop a leading
    space)."""
    valid = (labels != IGNORE_INDEX).tolist()
    following = torch.cat([inputs[1:], labels[-1:]])
    ids = [int(inputs[0]), *torch.where(labels == IGNORE_INDEX, following, labels).tolist()]
    total = start = 0
    for is_valid, run in itertools.groupby(valid):
        end = start + len(list(run))
        if is_valid:
            sizes = [
                len(tokenizer.decode(ids[: stop + 1], skip_special_tokens=True).encode())
                for stop in (start, end)
            ]
            total += sizes[1] - sizes[0]
        start = end
    return total
