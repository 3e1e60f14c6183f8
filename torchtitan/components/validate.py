"""Validation: the loss on held-out data, by the same definition as the training loss."""

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan.components.data.base import BaseDataLoader, Batch
from torchtitan.components.loss import IGNORE_INDEX, Measures
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.config.sections import require_at_least
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.process_group import on_all_ranks, sum_over_ranks
from torchtitan.tools.errors import UserError


class Validator(Configurable):
    """Measures the mean loss over all valid tokens of the validation data, over all ranks.

    Args:
        config: frequency and amount.
        model_parts: in evaluation mode meanwhile.
        dataloaders: name → loader over a set of validation data, once; "" names the only set.
        tokenizer: decodes the data to count bytes. None: the loss is not per token, and there are no bits per byte.
        batches_per_step: local batches in one rank's share of a global batch.
        sums_of_batch: batch from the loader → this rank's part of its summed loss, a scalar on the device, and of its
            weight, the number of valid tokens.
        measures: further means of `sums_of_batch`, reported as `validation_NAME`.
        counts_bytes: count the text of this rank's samples; of ranks with the same samples, one does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Validation."""

        enable: bool = False
        """Validate during training and at its end."""

        dataset: list[str] = field(default_factory=list)
        """Validation sets, each as in dataloader.dataset or as name=dataset; several are reported by name. None: the
        validation split of the training data, if it has one."""

        freq: int = 100
        """Training steps between validations."""

        steps: int = -1
        """Global batches per validation and set, so the samples are the same on any number of ranks; -1: all data."""

        at_start: bool = False
        """Also validate before the first step."""

        def validate(self) -> None:
            require_at_least(1, validator__freq=self.freq)
            if self.steps != -1 and self.steps < 1:
                raise UserError(f"--validator.steps is {self.steps}, and must be at least 1, or -1 for all")
            self.named_datasets()

        def named_datasets(self) -> dict[str, str]:
            """Return name → dataset of each set: the file's or folder's name if none is given, "" for the only set, and
            "" → "" for the training data's own validation split. Raise `UserError` for two sets of one name."""
            if not self.dataset:
                return {"": ""}
            named = [_split_name(text, default="" if len(self.dataset) == 1 else None) for text in self.dataset]
            for name, times in Counter(name for name, _ in named).items():
                if times > 1:
                    raise UserError(
                        f"--validator.dataset has {times} sets called '{name}': give them names, as in {name}2=..."
                    )
            return dict(named)

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
        measures: Measures | None = None,
        counts_bytes: bool = True,
    ):
        super().__init__(config)
        self.model_parts = model_parts
        self.tokenizer = tokenizer
        self.sets = {name: _Set(loader) for name, loader in dataloaders.items()}
        self.max_batches = config.steps * batches_per_step if config.steps != -1 else None
        self.sums_of_batch = sums_of_batch
        self.measures = measures or Measures((), device=torch.device("cpu"))
        self.counts_bytes = counts_bytes

    def is_due(self, step: int, *, last: bool) -> bool:
        return last or step % self.config.freq == 0

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure the validation data.

        Return `validation_loss`, the mean per valid token of all sets (NaN without any), `validation_bits_per_byte`,
        the same in bits per byte of predicted text, and both of each named set, as `validation_loss/NAME`;
        `validation_time` in seconds, and `validation_tokens_per_second`, valid tokens of all ranks.
        """
        begun = time.perf_counter()
        for part in self.model_parts:
            part.eval()
        of_sets = torch.stack([self._sums(data) for data in self.sets.values()])
        for part in self.model_parts:
            free_gathered_weights(part)
            part.train()
        of_sets = sum_over_ranks(of_sets)
        measured = self._means(of_sets.sum(dim=0))
        for name, sums in zip(self.sets, of_sets, strict=True):
            if name:
                measured |= {f"{key}/{name}": value for key, value in self._means(sums).items()}
        seconds = time.perf_counter() - begun
        if self.tokenizer:
            measured["validation_tokens_per_second"] = of_sets[:, 1].sum().item() / seconds
        return {**measured, "validation_time": seconds}

    def _sums(self, data: "_Set") -> Tensor:
        """Return this rank's part of a set's summed loss, weight, bytes and further measures, float64 (3 + 2 n,)."""
        self.measures.take()
        data.loader.load_state_dict(data.beginning)
        # float64: the mean must not depend on the order of batches or the number of ranks.
        totals, n_bytes = torch.zeros(2, dtype=torch.float64), 0
        for batch in itertools.islice(data.loader, self.max_batches):
            # With a stream, no rank knows when the other shares end; until then it gets batches that count nothing.
            if data.loader.n_samples is None and on_all_ranks(data.loader.exhausted):
                break
            loss, weight = self.sums_of_batch(batch)
            totals += torch.tensor([float(loss), float(weight)], dtype=torch.float64)
            if data.n_bytes is None and self.counts_bytes and self.tokenizer:
                n_bytes += count_bytes(batch, self.tokenizer)
        # The data is the same each time, and so is its size.
        data.n_bytes = n_bytes if data.n_bytes is None else data.n_bytes
        counted = torch.tensor([data.n_bytes], dtype=torch.float64)
        return torch.cat([totals, counted, self.measures.take().to("cpu", torch.float64)])

    def _means(self, sums: Tensor) -> dict[str, float]:
        nats, weight, n_bytes, *measured = sums.tolist()
        means = {"validation_loss": nats / weight if weight else math.nan}
        if self.tokenizer:
            means["validation_bits_per_byte"] = nats / math.log(2) / n_bytes if n_bytes else math.nan
        return means | {f"validation_{name}": value for name, value in self.measures.means(measured).items()}

    def close(self) -> None:
        for data in self.sets.values():
            data.loader.close()


class _Set:
    def __init__(self, loader: BaseDataLoader):
        self.loader = loader
        self.beginning = loader.state_dict()
        self.n_bytes: int | None = None  # of the text that this rank predicts, once they have been counted


def _split_name(text: str, default: str | None) -> tuple[str, str]:
    """Return name and dataset of `name=dataset`; for a dataset alone, `default` or the last part of its path."""
    if match := re.fullmatch(r"([\w.-]+)=(.+)", text):
        return match[1], match[2]
    return Path(text).name if default is None else default, text


def count_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 in the text of a batch's valid labels, without special tokens. A character cut by the
    end of a sample, or of its valid part, counts as 3 bytes on either side."""
    positions = batch.get("positions")
    total = 0
    for row, (inputs, labels) in enumerate(zip(batch["input"], batch["labels"], strict=True)):
        starts = (positions[row] == 0).nonzero().flatten().tolist() if positions is not None else []
        bounds = [0, *(start for start in starts if start > 0), len(inputs)]
        for begin, end in itertools.pairwise(bounds):
            total += _document_bytes(inputs[begin:end], labels[begin:end], tokenizer)
    return total


def _document_bytes(inputs: Tensor, labels: Tensor, tokenizer: Tokenizer) -> int:
    """Count one document: for each run of valid labels, decode the text up to its end and subtract the text before it,
    since a token's text may depend on it (some tokenizers drop a blank at the start)."""
    valid = (labels != IGNORE_INDEX).tolist()
    following = torch.cat([inputs[1:], labels[-1:]])
    ids = [int(inputs[0]), *torch.where(labels == IGNORE_INDEX, following, labels).tolist()]
    total = place = 0
    for is_valid, run in itertools.groupby(valid):
        end = place + len(list(run))
        if is_valid:
            sizes = [len(tokenizer.decode(ids[: stop + 1], skip_special_tokens=True).encode()) for stop in (place, end)]
            total += sizes[1] - sizes[0]
        place = end
    return total
