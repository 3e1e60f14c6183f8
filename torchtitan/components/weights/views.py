"""Sources derived from other sources: other names and layouts, plain or converted models, joined sources, more rows."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.components.weights.load import check_fit
from torchtitan.protocols.converter import ModelConverter
from torchtitan.protocols.initializer import DerivedRows
from torchtitan.protocols.model import ConvertedModule, converted_modules
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import Identity, StateDictAdapter, check_tied
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, full_slices

_COMPARED_ELEMENTS = 2**24
_COMPUTED_ELEMENTS = 2**24
_READ_ROWS = 8192


class Recipe(NamedTuple):
    """Computation of some tensors of a view from tensors of its source."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    compute: Callable[[list[Tensor]], Iterable[Tensor]] | None
    """None: a single tensor, unchanged."""


class View(TensorSource):
    """Reads another source by recipes. The outputs of the last recipe are kept until they have been read, since they
    are read in sequence and each needs all inputs."""

    def __init__(self, source: TensorSource, specs: Mapping[str, TensorSpec], recipes: Iterable[Recipe]):
        self.specs = specs
        self._source = source
        self._recipes = {name: recipe for recipe in recipes for name in recipe.outputs}
        self._last: dict[str, Tensor] = {}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        inputs, outputs, compute = self._recipes[name]
        if compute is None:
            return self._source.read(inputs[0], slices)
        if name not in self._last:
            self._last = {}  # before, so that not both are held
            with torch.no_grad():
                made = compute([self._source.read(each) for each in inputs])
            self._last = dict(zip(outputs, made, strict=True))
        tensor = self._last[name]
        if len(self._last) == 1:
            self._last = {}
        return tensor if slices is None else tensor[slices]


class InternalView(View):
    """An external format's tensors under our names, in our layout (`internal_specs`), with `source`'s dtypes. Raises
    `UserError` if tensors are missing, unknown or of another shape, or tied ones differ; it names them."""

    def __init__(self, source: TensorSource, adapter: StateDictAdapter, internal_specs: Mapping[str, TensorSpec]):
        specs: dict[str, TensorSpec] = {}
        recipes = []
        for step in adapter.plan(source.specs, internal_specs):
            shapes = [internal_specs[name].shape for name in step.internal]
            dtype = source.specs[step.external[0]].dtype
            specs |= {name: TensorSpec(shape, dtype) for name, shape in zip(step.internal, shapes, strict=True)}
            compute = None if step.transform == Identity() else partial(step.transform.to_internal, shapes=shapes)
            recipes.append(Recipe(step.external, step.internal, compute))
        super().__init__(source, specs, recipes)
        for name, tied_to in adapter.tied.items():
            if name in source.specs:
                _compare(source, name, tied_to)


class ExternalView(View):
    """A source of all tensors of one of our models in another format. Raises `UserError` if `source` lacks tensors of
    the adapter's table or has others; it names them."""

    def __init__(self, source: TensorSource, adapter: StateDictAdapter):
        recipes = [
            Recipe(step.internal, step.external, None if step.transform == Identity() else step.transform.to_external)
            for step in adapter.steps
        ]
        super().__init__(source, adapter.external_specs(source.specs), recipes)


def _compare(source: TensorSource, name: str, tied_to: str) -> None:
    shape = source.specs[name].shape
    rows = max(1, _COMPARED_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], rows):
        part = (slice(start, min(start + rows, shape[0])), *full_slices(shape)[1:])
        check_tied(name, source.read(name, part), tied_to, source.read(tied_to, part))


class PlainView(View):
    """Tensors of a plain model, computed from a converted one, module by module. Values may be more precise than the
    types in `specs`, the default types to write.

    Args:
        source: the converted model's tensors, under its names.
        model: the converted model, on the meta device; it marks trained parameters, as far as known.
        converters: applied to the model.

    Raises:
        UserError: if `source` lacks some of the model's tensors; it names them.
    """

    def __init__(self, source: TensorSource, model: nn.Module, converters: Sequence[ModelConverter]):
        self._model, self._converters = model, converters
        tensors = model.state_dict()
        check_fit(source.specs, tensors)
        modules = dict(converted_modules(model))
        members: dict[str, list[str]] = {}
        for name in tensors:
            members.setdefault(_split(name)[0], []).append(name)
        specs: dict[str, TensorSpec] = {}
        recipes: list[Recipe] = []
        for name in tensors:
            prefix, _ = _split(name)
            if prefix not in modules:
                specs[name] = source.specs[name]
                recipes.append(Recipe([name], [name], None))
            elif name == members[prefix][0]:
                made, recipe = _plain_recipe(prefix, modules[prefix], members[prefix], source.specs)
                specs |= made
                recipes.append(recipe)
        super().__init__(source, specs, recipes)

    def write_extra_files(self, folder: Path, spec: ModelSpec) -> None:
        """Let the converters write their additional files next to the plain model in Hugging Face's format."""
        for converter in self._converters:
            converter.write_export_files(folder, spec, self._model, self._source.read)


def _plain_recipe(
    prefix: str, module: ConvertedModule, inputs: Sequence[str], specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, TensorSpec], Recipe]:
    """Return the specs of the plain module's tensors, and how to compute them from `inputs`, the converted module's."""

    def named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {_split(name)[1]: tensor for name, tensor in zip(inputs, tensors, strict=True)}

    own = named([torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta") for name in inputs])
    plain, types = module.plain_state(own), module.plain_types(own)
    made = {_join(prefix, name): TensorSpec(tensor.shape, types[name]) for name, tensor in plain.items()}
    return made, Recipe(inputs, list(made), lambda tensors: module.plain_state(named(tensors)).values())


class ConvertedView(TensorSource):
    """Tensors of a converted model that follow from the plain one: all except the `added` ones. `source` has all
    tensors of the plain model; `model` is the converted one on the meta device. Only the requested rows of a derived
    tensor are computed, from the same rows of the plain tensor."""

    def __init__(self, source: TensorSource, model: nn.Module):
        self._source = source
        self._derived: dict[str, tuple[str, DerivedRows]] = {}
        specs: dict[str, TensorSpec] = {}
        modules = dict(converted_modules(model))
        for name, tensor in model.state_dict().items():
            prefix, own = _split(name)
            module = modules.get(prefix)
            if module is not None and own in module.derived:
                rows = module.derived[own]
                self._derived[name] = (_join(prefix, rows.plain), rows)
                specs[name] = TensorSpec.of(tensor)
            elif module is None or own not in module.added:
                specs[name] = source.specs[name]
        self.specs = specs

    @torch.no_grad()
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name not in self._derived:
            return self._source.read(name, slices)
        plain, derived = self._derived[name]
        rows, *columns = slices or full_slices(self.specs[name].shape)
        source = self._source.read(plain, (rows, *full_slices(derived.shape)[1:]))
        n_rows = max(1, _COMPUTED_ELEMENTS // derived.shape[1:].numel())
        parts = [derived.from_rows(part.float())[(slice(None), *columns)] for part in source.split(n_rows)]
        return torch.cat(parts)


def _split(name: str) -> tuple[str, str]:
    prefix, _, own = name.rpartition(".")
    return prefix, own


def _join(prefix: str, own: str) -> str:
    return f"{prefix}.{own}" if prefix else own


class ChainedSource(TensorSource):
    """All tensors of `first`, and the tensors of `other` that it lacks."""

    def __init__(self, first: TensorSource, other: TensorSource):
        self._first, self._other = first, other
        self.specs = {**other.specs, **first.specs}

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        source = self._first if name in self._first.specs else self._other
        return source.read(name, slices)


class ResizedEmbedding(TensorSource):
    """Tensors of `source` (our names and layout); in `names`, with a row per token, the rows of `added` ids are the
    mean of the rows below. A tensor that ends below the first of them is unchanged.

    Existing rows of `added` ids are padding: published vocabularies end at a multiple of some number. The mean is the
    neutral start: a new token gets the logit of an average one, so the loss hardly changes (J. Hewitt, "Initializing
    New Word Embeddings for Pretrained Language Models", 2021).
    """

    def __init__(self, source: TensorSource, names: Collection[str], added: range):
        self._source, self._added = source, added
        known = sorted(name for name in names if name in source.specs)
        self._names = [name for name in known if source.specs[name].shape[0] >= added.start]
        self.specs = dict(source.specs)
        for name in self._names:
            shape, dtype = source.specs[name].shape, source.specs[name].dtype
            self.specs[name] = TensorSpec(torch.Size([max(shape[0], added.stop), *shape[1:]]), dtype)

    @property
    def growth(self) -> str:
        """Description of the rows of added tokens."""
        return f"rows {self._added.start} to {self._added.stop - 1} of {', '.join(self._names)}"

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        rows, *columns = slices or full_slices(self.specs[name].shape)
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
        """Return the mean of the rows below the added tokens, summed in double precision, some rows at a time."""
        total = torch.zeros([part.stop - part.start for part in columns], dtype=torch.float64)
        for start in range(0, self._added.start, _READ_ROWS):
            rows = slice(start, min(start + _READ_ROWS, self._added.start))
            total += self._source.read(name, (rows, *columns)).sum(dim=0, dtype=torch.float64)
        return (total / self._added.start).to(self.specs[name].dtype)
