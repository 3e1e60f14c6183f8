"""What a data loader knows of its data before any training, for people to look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan.components.data.finetuning.policies import Report
from torchtitan.components.data.packing import Array
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """One data set."""

    name: str
    """As the configuration names it."""
    report: Report
    """What became of its rows."""
    lengths: Array
    """Tokens of each sample (n,), those included that are left out or cut because they are too long."""
    epochs: float
    """How often the run reads it."""
    max_epochs: float | None
    """How often it may be read; None: without limit."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """All data sets of a loader, and how they become samples of the model."""

    sets: Sequence[SetSummary]
    max_length: int
    """Most tokens of a sample, for `SetSummary.lengths` to be compared with."""
    windows_per_epoch: int
    """Rows (T,) of batches that all data makes when it is read once."""
    packing_efficiency: float | None
    """Share of these rows' positions that hold data; None: samples are not packed."""
    follows_seed: bool
    """Whether the order is decided by configuration and seed alone, so that any step's data can be told beforehand."""


def numbers_of(names: Sequence[str], name_of: Callable[[int], str], n_samples: int) -> list[int]:
    """The samples with these names.

    Args:
        names: to look for.
        name_of: a sample's name by its number.
        n_samples: numbers go from 0 to below this.

    Raises:
        UserError: there is none of a name.
    """
    wanted = set(names)
    found = {name: number for number in range(n_samples) if (name := name_of(number)) in wanted}
    if missing := [name for name in names if name not in found]:
        raise UserError(f"'{missing[0]}' is no sample of this data; was it another configuration's?")
    return [found[name] for name in names]
