"""A source seen under other names: one in a foreign format as our models have it, and the other way round."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats.source import Slices, TensorSource
from torchtitan.protocols.state_dict_adapter import Same, StateDictAdapter, Step, TensorForm, check_tied

_COMPARED_ELEMENTS = 2**24


class View(TensorSource):
    """Reads another source by the rows of a table. Of a row that makes several tensors, the last one made is kept:
    they are asked for one after the other, and each needs all that the row reads."""

    def __init__(self, source: TensorSource):
        self._source = source
        self._last: dict[str, Tensor] = {}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says. A tensor that is the same on both sides is
        read in part; of others, all of the row is."""
        if (same := self._same(name)) is not None:
            return self._source.read(same, slices)
        if name not in self._last:
            self._last = {}  # before, so that not both rows are held
            self._last = self._make(name)
        tensor = self._last[name]
        if len(self._last) == 1:
            self._last = {}
        return tensor if slices is None else tensor[slices]

    @abstractmethod
    def _same(self, name: str) -> str | None:
        """The name on the other side of a tensor that is the same there."""

    @abstractmethod
    def _make(self, name: str) -> dict[str, Tensor]:
        """All tensors of the row that has `name`."""


class ConvertedSource(View):
    """A source in a foreign format under our names and in our layout.

    Args:
        source: the foreign tensors.
        adapter: the table of the model's configuration.
        native_forms: name → form of the model's own tensors (`model_forms`); dtypes are those of `source`.

    Raises:
        UserError: where tensors are missing, unknown or of another shape, or tied ones differ; it names them.
    """

    def __init__(self, source: TensorSource, adapter: StateDictAdapter, native_forms: Mapping[str, TensorForm]):
        super().__init__(source)
        self._steps = {name: step for step in adapter.plan(source.forms, native_forms) for name in step.native}
        self.forms = {name: self._form(step, native_forms[name]) for name, step in self._steps.items()}
        for name, tied_to in adapter.tied.items():
            if name in source.forms:
                _compare(source, name, tied_to)

    def _form(self, step: Step, native: TensorForm) -> TensorForm:
        return TensorForm(native.shape, self._source.forms[step.foreign[0]].dtype)

    def _same(self, name: str) -> str | None:
        step = self._steps[name]
        return step.foreign[0] if step.transform == Same() else None

    def _make(self, name: str) -> dict[str, Tensor]:
        step = self._steps[name]
        shapes = [self.forms[native].shape for native in step.native]
        tensors = step.transform.to_native([self._source.read(foreign) for foreign in step.foreign], shapes)
        return dict(zip(step.native, tensors, strict=True))


class ForeignView(View):
    """A source with our names and layout, as another format has it.

    Args:
        source: all tensors of the model.
        adapter: the table of the model's configuration.

    Raises:
        UserError: where `source` lacks tensors of the table or has others; it names them.
    """

    def __init__(self, source: TensorSource, adapter: StateDictAdapter):
        super().__init__(source)
        self.forms = adapter.foreign_forms(source.forms)
        self._steps = {name: step for step in adapter.steps for name in step.foreign}

    def _same(self, name: str) -> str | None:
        step = self._steps[name]
        return step.native[0] if step.transform == Same() else None

    def _make(self, name: str) -> dict[str, Tensor]:
        step = self._steps[name]
        tensors = step.transform.to_foreign([self._source.read(native) for native in step.native])
        return dict(zip(step.foreign, tensors, strict=True))


def _compare(source: TensorSource, name: str, tied_to: str) -> None:
    """Make sure that two tensors are equal, some rows at a time."""
    shape = source.forms[name].shape
    rows = max(1, _COMPARED_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], rows):
        part = (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))
        check_tied(name, source.read(name, part), tied_to, source.read(tied_to, part))
