"""A source whose vocabulary is smaller than the model's: rows for added tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, whole
from torchtitan.protocols.state_dict_adapter import TensorForm

_READ_ROWS = 8192


class GrownVocabulary(TensorSource):
    """The tensors of `source`, those with too few rows for the model continued by the mean of the rows there are.

    The mean is where a token begins of which nothing is known: its logit is that of an average token, so the loss is
    close to what it was before (J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021).

    Args:
        source: the weights under our names and in our layout.
        native_forms: name → form of the model's own tensors; those of `source` differ in the number of rows alone.
    """

    def __init__(self, source: TensorSource, native_forms: Mapping[str, TensorForm]):
        self._source = source
        self.forms = {
            name: TensorForm(native_forms[name].shape if name in native_forms else form.shape, form.dtype)
            for name, form in source.forms.items()
        }
        self._grown = {name for name, form in self.forms.items() if form != source.forms[name]}

    @property
    def growth(self) -> str:
        """Which tensors have how many more rows, in words."""
        rows = {name: (self._source.forms[name].shape[0], self.forms[name].shape[0]) for name in sorted(self._grown)}
        return ", ".join(f"{name} {before} -> {after}" for name, (before, after) in rows.items())

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says; all rows of the source are read only for a
        part that has new ones."""
        if name not in self._grown:
            return self._source.read(name, slices)
        rows, *columns = slices or whole(self.forms[name].shape)
        n_saved = self._source.forms[name].shape[0]
        if rows.stop <= n_saved:
            return self._source.read(name, (rows, *columns))
        mean = self._mean_row(name, tuple(columns))
        new = mean.expand(rows.stop - max(rows.start, n_saved), *mean.shape)
        if rows.start >= n_saved:
            return new
        return torch.cat([self._source.read(name, (slice(rows.start, n_saved), *columns)), new])

    def _mean_row(self, name: str, columns: Slices) -> Tensor:
        """The mean of the source's rows, summed in double precision, some rows at a time."""
        form = self._source.forms[name]
        total = torch.zeros([part.stop - part.start for part in columns], dtype=torch.float64)
        for start in range(0, form.shape[0], _READ_ROWS):
            rows = slice(start, min(start + _READ_ROWS, form.shape[0]))
            total += self._source.read(name, (rows, *columns)).sum(dim=0, dtype=torch.float64)
        return (total / form.shape[0]).to(form.dtype)
