"""Filters for empty and broken rows, and limits on tokens. The module `samples` handles samples
longer than a window."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    EmptySample,
    LossySample,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.plan.sampler import Array
from torchtitan.tools.errors import UserError, require

Policy = Literal["drop", "error"]

LossPolicy = Literal["error", "drop", "train"]


class Dropped(NamedTuple):
    """Reason for dropping a sample."""

    reason: str
    """Option that drops the sample (`too_long`, `broken`, `min_tokens`, …), or a name for samples
    that no option keeps (`tag_in_reasoning`, `rewritten`)."""
    why: str
    """Details of this sample."""


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Filters applied before truncation, named like the options of the loader.

    Raises:
        UserError: no sample could pass the limits.
    """

    empty: Policy = "drop"
    """Policy for rows without content."""
    broken: Policy = "error"
    """Policy for rows that cannot be read, converted or encoded."""
    untrained: Policy | None = "drop"
    """Policy for samples without predicted tokens; None: the encoder checks this."""
    on_loss_of_reasoning: LossPolicy = "drop"
    """Policy for rows with a trained turn whose reasoning the template omits."""
    on_loss_of_tools: LossPolicy = "drop"
    on_loss_of_content: LossPolicy = "drop"
    min_tokens: int = 0
    max_tokens: int | None = None
    """Maximum tokens of a sample; None: no limit."""
    token_range: tuple[int, int] | None = None
    """Smallest and largest allowed token id; None: any."""
    max_repetition: float = 1.0
    """Maximum fraction of repeated n-grams in a sample; 1: no limit."""
    repetition_ngram: int = 10

    def __post_init__(self) -> None:
        require(self.min_tokens >= 0, "--dataloader.min_tokens", self.min_tokens, "at least 0")
        least, most = max(1, self.min_tokens), self.max_tokens
        require(
            most is None or most >= least,
            "--dataloader.max_tokens",
            most,
            f"at least {least} (min_tokens)",
        )
        require(
            0 <= self.max_repetition <= 1,
            "--dataloader.max_repetition",
            self.max_repetition,
            "from 0 to 1",
        )
        require(
            self.repetition_ngram >= 1,
            "--dataloader.repetition_ngram",
            self.repetition_ngram,
            "at least 1 token",
        )

    def apply(self, sample: EncodedRow | BrokenSample) -> EncodedRow | Dropped:
        """Return the sample, or the reason to drop it. Raise `UserError` for the policy `error`."""
        if isinstance(sample, EmptySample):
            return _drop("empty", str(sample), self.empty)
        if isinstance(sample, LossySample):
            policy: Policy = "error" if getattr(self, sample.reason, "drop") == "error" else "drop"
            return _drop(sample.reason, str(sample), policy)
        if isinstance(sample, BrokenSample):
            return _drop("broken", str(sample), self.broken)
        if sample.n_tokens == 0:
            return _drop("empty", "it has no tokens", self.empty)
        if dropped := self.drop_reason(sample.ids):
            return dropped
        if self.untrained and sample.n_trained == 0:
            return _drop("untrained", "it has no trained tokens", self.untrained)
        return sample

    def drop_reason(self, ids: Array) -> Dropped | None:
        """Return the first limit violated by token ids (n,), with details; None if they pass."""
        if len(ids) < self.min_tokens:
            return Dropped("min_tokens", f"{len(ids)} tokens, fewer than {self.min_tokens}")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Dropped("max_tokens", f"{len(ids):,} tokens, more than {self.max_tokens:,}")
        if self.token_range is not None:
            low, high = self.token_range
            outside = ids[(ids < low) | (ids > high)]
            if len(outside):
                return Dropped("token_range", f"token {outside[0]} is outside {low} to {high}")
        if self.max_repetition < 1:
            share = repetition(ids, self.repetition_ngram)
            if share > self.max_repetition:
                shown = f"{share:.0%} of its {self.repetition_ngram}-grams are repetitions"
                return Dropped("max_repetition", f"{shown}, more than {self.max_repetition:.0%}")
        return None


def _drop(reason: str, why: str, policy: Policy) -> Dropped:
    if policy == "error":
        raise UserError(
            f"{why}; set --dataloader.{reason} drop to skip such rows (torchtitan data inspect "
            "counts them)"
        )
    return Dropped(reason, why)


def repetition(ids: Array, n: int) -> float:
    """Return the fraction of n-grams that repeat an earlier one, 0 for fewer than `n` ids.

    Based on the repetition filters of Rae et al. 2021 (arXiv:2112.11446, table A1), with tokens
    instead of words.
    """
    n_grams = len(ids) - n + 1
    if n_grams < 1:
        return 0.0
    values = ids.tolist()
    return 1 - len(set(zip(*(values[i:] for i in range(n)), strict=False))) / n_grams
