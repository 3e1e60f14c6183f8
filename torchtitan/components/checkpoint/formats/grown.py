"""A source that knows nothing of added tokens: rows for them."""

from collections.abc import Collection

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, whole
from torchtitan.protocols.state_dict_adapter import TensorForm

_READ_ROWS = 8192


class GrownVocabulary(TensorSource):
    """The tensors of `source`; in those with a row per token, the rows of `added` are the mean of the rows below.

    So they are where `source` ends before them, and where it has rows there: published vocabularies are padded to a
    multiple of some number, with rows that no token has trained.

    The mean is where a token begins of which nothing is known: its logit is that of an average token, so the loss is
    close to what it was before (J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021).

    Args:
        source: the weights under our names and in our layout.
        names: the tensors with a row per token.
        added: ids of the added tokens. A tensor that ends below the first of them stays as it is.
    """

    def __init__(self, source: TensorSource, names: Collection[str], added: range):
        self._source, self._added = source, added
        self._names = sorted(name for name in names if name in source.forms and _n_rows(source, name) >= added.start)
        self.forms = dict(source.forms)
        for name in self._names:
            shape, dtype = source.forms[name].shape, source.forms[name].dtype
            self.forms[name] = TensorForm(torch.Size([max(shape[0], added.stop), *shape[1:]]), dtype)

    @property
    def growth(self) -> str:
        """Which rows of which tensors are those of added tokens, in words."""
        return f"rows {self._added.start} to {self._added.stop - 1} of {', '.join(self._names)}"

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says; all rows below those of added tokens are read
        only for a part that has some of these."""
        rows, *columns = slices or whole(self.forms[name].shape)
        start, stop = max(rows.start, self._added.start), min(rows.stop, self._added.stop)
        if name not in self._names or start >= stop:
            return self._source.read(name, slices)
        mean = self._mean_row(name, tuple(columns))
        parts = [mean.expand(stop - start, *mean.shape)]
        if rows.start < start:
            parts.insert(0, self._source.read(name, (slice(rows.start, start), *columns)))
        if stop < rows.stop:
            parts.append(self._source.read(name, (slice(stop, rows.stop), *columns)))
        return torch.cat(parts)

    def _mean_row(self, name: str, columns: Slices) -> Tensor:
        """The mean of the rows below those of added tokens, summed in double precision, some rows at a time."""
        total = torch.zeros([part.stop - part.start for part in columns], dtype=torch.float64)
        for start in range(0, self._added.start, _READ_ROWS):
            rows = slice(start, min(start + _READ_ROWS, self._added.start))
            total += self._source.read(name, (rows, *columns)).sum(dim=0, dtype=torch.float64)
        return (total / self._added.start).to(self.forms[name].dtype)


def _n_rows(source: TensorSource, name: str) -> int:
    return source.forms[name].shape[0]
