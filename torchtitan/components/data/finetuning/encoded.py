"""Samples as token ids, with the counts of what a model learns from them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchtitan.components.data.finetuning.attempts import Turn


class Facts(NamedTuple):
    """Counts of what a model learns from the turns of a sample."""

    n_turns: int = 0
    n_stops: int = 0
    """Turns that end with a stop."""
    n_only_stops: int = 0
    """Turns with only the stop trained."""
    options: tuple[str, ...] = ()
    """Options of the template that turns were rendered with, such as `enable_thinking=False`."""
    lost: tuple[str, ...] = ()
    """Parts that the template omits: trained parts whose loss the loader accepts, and parts of
    prompts."""
    unprompted: tuple[str, ...] = ()
    """Why turns are not trained for which the template has no prompt."""

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Facts":
        if not turns:
            return cls()
        options = [f"{name}={value}" for turn in turns for name, value in turn.form.options]
        return cls(
            len(turns),
            sum([bool(turn.stop) for turn in turns]),
            sum([turn.is_only_a_stop for turn in turns]),
            tuple(dict.fromkeys(options)),
            tuple(dict.fromkeys([part for turn in turns for part in (*turn.lost, *turn.unseen)])),
            tuple([reason for turn in turns for reason in turn.unprompted]),
        )


class EncodedSample(NamedTuple):
    """A sample as token ids."""

    ids: np.ndarray
    """Token ids, int64 (n,)."""
    trained: np.ndarray
    """Mask of the tokens that the model learns to predict, bool (n,)."""
    n_special_in_text: int = 0
    """Special tokens written in the text rather than by the template."""
    facts: Facts = Facts()


class EncodedRow(NamedTuple):
    """A sample of a row; a conversation whose template rewrites earlier turns has several."""

    parts: tuple[EncodedSample, ...]
    """Token sequences; all samples of a kind have the same number."""
    answer: str | None = None
    images: Sequence[Mapping[str, Any]] = ()
    """Images of the sample in order, as JSON-serializable objects."""

    @property
    def ids(self) -> np.ndarray:
        """Concatenated token ids of all parts, int64 (n,)."""
        return _concatenated([part.ids for part in self.parts])

    @property
    def trained(self) -> np.ndarray:
        """Mask of the tokens that the model learns to predict, bool (n,)."""
        return _concatenated([part.trained for part in self.parts])

    @property
    def n_tokens(self) -> int:
        return sum([len(part.ids) for part in self.parts])

    @property
    def n_trained(self) -> int:
        """Predicted tokens: the trained tokens except the first token of each part."""
        return sum([int(np.count_nonzero(part.trained[1:])) for part in self.parts])

    @property
    def n_special_in_text(self) -> int:
        return sum([part.n_special_in_text for part in self.parts])


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
