"""The weights of a converted model seen as those of the plain one, and the other way round, tensor by tensor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan.components.checkpoint.formats.convert import View
from torchtitan.components.checkpoint.formats.load import check_fit
from torchtitan.components.checkpoint.formats.source import Slices, TensorSource, whole
from torchtitan.protocols.converter import ModelConverter
from torchtitan.protocols.initializer import DerivedRows
from torchtitan.protocols.model import ConvertedModule, converted_modules
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import TensorForm

_COMPUTED_ELEMENTS = 2**24


class PlainView(View):
    """The tensors of a plain model, made of those of a converted one, one module at a time.

    Values may be more precise than the types in `forms`, which are those to write where nobody asks for others.

    Args:
        source: the converted model's tensors, under its names.
        model: the converted model, on the meta device; which of its parameters were trained, as far as that is known.
        converters: those that have been applied to it.

    Raises:
        UserError: where `source` does not have the model's tensors; it names them.
    """

    def __init__(self, source: TensorSource, model: nn.Module, converters: Sequence[ModelConverter]):
        super().__init__(source)
        self._model, self._converters = model, converters
        names = list(model.state_dict())
        check_fit(source.forms, model.state_dict())
        modules = dict(converted_modules(model))
        self._own_names: dict[str, list[str]] = {prefix: [] for prefix in modules}
        for name in names:
            prefix, own = _split(name)
            if prefix in modules:
                self._own_names[prefix].append(own)
        self._made_by: dict[str, tuple[str, ConvertedModule]] = {}
        forms: dict[str, TensorForm] = {}
        for name in names:
            prefix, own = _split(name)
            if prefix not in modules:
                forms[name] = source.forms[name]
            elif own == self._own_names[prefix][0]:
                forms |= self._plain_forms(prefix, modules[prefix])
        self.forms = forms

    def write_beside(self, folder: Path, spec: ModelSpec) -> None:
        """Let the converters write what is of use by itself into `folder`, which has the plain model in Hugging Face's
        format."""
        for converter in self._converters:
            converter.write_beside_export(folder, spec, self._model, self._source.read)

    def _plain_forms(self, prefix: str, module: ConvertedModule) -> dict[str, TensorForm]:
        own_forms = {own: self._source.forms[_join(prefix, own)] for own in self._own_names[prefix]}
        own = {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in own_forms.items()}
        plain, types = module.plain_state(own), module.plain_types(own)
        forms = {_join(prefix, name): TensorForm(tensor.shape, types[name]) for name, tensor in plain.items()}
        self._made_by |= dict.fromkeys(forms, (prefix, module))
        return forms

    def _same(self, name: str) -> str | None:
        return None if name in self._made_by else name

    @torch.no_grad()
    def _make(self, name: str) -> dict[str, Tensor]:
        prefix, module = self._made_by[name]
        own = {own: self._source.read(_join(prefix, own)) for own in self._own_names[prefix]}
        return {_join(prefix, plain): tensor for plain, tensor in module.plain_state(own).items()}


class ConvertedView(TensorSource):
    """The tensors of a converted model, as far as they follow from those of the plain one: none of the `added` ones.

    Of a derived tensor's rows, those that are asked for are computed, from the same rows of the plain tensor.

    Args:
        source: the plain model's tensors, all of them, of the right shapes.
        model: the converted model, on the meta device.
    """

    def __init__(self, source: TensorSource, model: nn.Module):
        self._source = source
        self._derived: dict[str, tuple[str, DerivedRows]] = {}
        forms: dict[str, TensorForm] = {}
        modules = dict(converted_modules(model))
        for name, tensor in model.state_dict().items():
            prefix, own = _split(name)
            module = modules.get(prefix)
            if module is not None and own in module.derived:
                rows = module.derived[own]
                self._derived[name] = (_join(prefix, rows.plain), rows)
                forms[name] = TensorForm.of(tensor)
            elif module is None or own not in module.added:
                forms[name] = source.forms[name]
        self.forms = forms

    @torch.no_grad()
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """The tensor of that name, or the part of it that `slices` says."""
        if name not in self._derived:
            return self._source.read(name, slices)
        plain, derived = self._derived[name]
        rows, *columns = slices or whole(self.forms[name].shape)
        source = self._source.read(plain, (rows, *whole(derived.shape)[1:]))
        n_rows = max(1, _COMPUTED_ELEMENTS // derived.shape[1:].numel())
        parts = [derived.from_rows(part.float())[(slice(None), *columns)] for part in source.split(n_rows)]
        return torch.cat(parts)


def _split(name: str) -> tuple[str, str]:
    """The module's name and the tensor's name in it."""
    prefix, _, own = name.rpartition(".")
    return prefix, own


def _join(prefix: str, own: str) -> str:
    return f"{prefix}.{own}" if prefix else own
