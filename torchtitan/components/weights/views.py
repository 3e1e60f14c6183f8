"""Tensor sources computed from other sources: renamed, converted, merged, chained or resized."""

import copy
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
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.sharded import is_dtensor

_COMPARED_ELEMENTS = 2**24
_COMPUTED_ELEMENTS = 2**24
_READ_ROWS = 8192


class Recipe(NamedTuple):
    """Computation of some tensors of a view from tensors of its source."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    compute: Callable[[list[Tensor]], Iterable[Tensor]] | None
    """None for a single, unchanged tensor."""

    inputs_of_rows: Callable[[slice], Sequence[tuple[str, slice]] | None] = lambda rows: None
    """Rows of the only output → the inputs, and the rows of each, that `compute` needs for them;
    None: all."""


class View(TensorSource):
    """Computes tensors from another source by recipes. The outputs of the last recipe are cached,
    since they are usually read one after another and each requires all inputs."""

    def __init__(
        self, source: TensorSource, specs: Mapping[str, TensorSpec], recipes: Iterable[Recipe]
    ):
        self.specs = specs
        self._source = source
        self._recipes = {name: recipe for recipe in recipes for name in recipe.outputs}
        self._last: dict[str, Tensor] = {}
        self.forms, self.reasons = self._few_bits(source)

    def _few_bits(self, source: TensorSource) -> tuple[dict[str, str], dict[str, str]]:
        """Return the forms of the view's tensors, and the reasons of others."""
        all_forms, all_reasons = dict[str, str](), dict[str, str]()
        if not source.forms and not source.reasons:
            return all_forms, all_reasons
        for name, recipe in self._recipes.items():
            reasons = [source.reasons[each] for each in recipe.inputs if each in source.reasons]
            forms = {source.forms.get(each, "") for each in recipe.inputs}
            if len(forms) > 1:
                reasons.append("it joins weights in several forms")
            if reasons:
                all_reasons[name] = reasons[0]
            elif form := next(iter(forms), ""):
                all_forms[name] = form
        return all_forms, all_reasons

    def of_part(self, part: str) -> TensorSource:
        if not self.forms:
            return self
        view = copy.copy(self)
        view._source, view._last = self._source.of_part(part), {}
        return view

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        recipe = self._recipes[name]
        if recipe.compute is None:
            return self._source.read(recipe.inputs[0], slices)
        parts = None if slices is None else recipe.inputs_of_rows(slices[0])
        if slices is not None and parts is not None:
            (tensor,) = recipe.compute([self._read_rows(each, rows) for each, rows in parts])
            return tensor[(slice(None), *slices[1:])]
        if name not in self._last:
            self._last = {}  # free the memory first
            with torch.no_grad():
                tensors = recipe.compute([self._source.read(each) for each in recipe.inputs])
            self._last = dict(zip(recipe.outputs, tensors, strict=True))
        tensor = self._last[name]
        if len(self._last) == 1:
            self._last = {}
        return tensor if slices is None else tensor[slices]

    def _read_rows(self, name: str, rows: slice) -> Tensor:
        everything = full_slices(self._source.specs[name].shape)
        return self._source.read(name, None if rows == slice(None) else (rows, *everything[1:]))


class RenamedView(View):
    """Tensors of a checkpoint under the names that `name_of` returns, except tensors with the
    result None. Raises `UserError` if two tensors get the same name."""

    def __init__(self, source: TensorSource, name_of: Callable[[str], str | None]):
        given: dict[str, str] = {}
        for name in source.specs:
            known = name_of(name)
            if known is not None and given.setdefault(known, name) != name:
                raise UserError(f"the checkpoint has {known} twice: {given[known]} and {name}")
        specs = {known: source.specs[name] for known, name in given.items()}
        super().__init__(
            source, specs, [Recipe((name,), (known,), None) for known, name in given.items()]
        )


class InternalView(View):
    """An external format's tensors with our names and layout (`internal_specs`) and the dtypes of
    `source`. Raises `UserError`, naming the tensors, if any are missing, unexpected or of the wrong
    shape, or if tied tensors differ."""

    def __init__(
        self,
        source: TensorSource,
        adapter: StateDictAdapter,
        internal_specs: Mapping[str, TensorSpec],
    ):
        specs: dict[str, TensorSpec] = {}
        recipes = []
        match = adapter.plan(source.specs, internal_specs)
        for step in match.steps:
            shapes = [internal_specs[name].shape for name in step.internal]
            dtype = source.specs[step.external[0]].dtype
            specs |= {
                name: TensorSpec(shape, dtype)
                for name, shape in zip(step.internal, shapes, strict=True)
            }
            compute = (
                None
                if step.transform == Identity()
                else partial(step.transform.to_internal, shapes=shapes)
            )
            n_rows = shapes[0][0] if shapes[0] else 1
            of_rows = partial(step.transform.inputs_of_rows, n_rows=n_rows, names=step.external)
            recipes.append(Recipe(step.external, step.internal, compute, of_rows))
        super().__init__(source, specs, recipes)
        for name, tied_to in match.tied.items():
            _check_tied_tensors(source, name, tied_to)


class ExternalView(View):
    """All tensors of a torchtitan model in another format. Raises `UserError`, naming the tensors,
    unless `source` has exactly the tensors in the adapter's table."""

    def __init__(self, source: TensorSource, adapter: StateDictAdapter):
        recipes = [
            Recipe(
                step.internal,
                step.external,
                None if step.transform == Identity() else step.transform.to_external,
            )
            for step in adapter.steps
        ]
        super().__init__(source, adapter.external_specs(source.specs), recipes)


def _check_tied_tensors(source: TensorSource, name: str, tied_to: str) -> None:
    shape = source.specs[name].shape
    rows = max(1, _COMPARED_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], rows):
        part = (slice(start, min(start + rows, shape[0])), *full_slices(shape)[1:])
        check_tied(name, source.read(name, part), tied_to, source.read(tied_to, part))


class PlainView(View):
    """Tensors of a plain model, computed from a converted one's in `source`, module by module. They
    may be more precise than the dtypes in `specs`, which are the default dtypes to write. `model`
    is the converted one on the meta device, with trained parameters marked if known. Raises
    `UserError`, naming tensors, if `source` does not fit it."""

    def __init__(
        self, source: TensorSource, model: nn.Module, converters: Sequence[ModelConverter]
    ):
        self._model, self._converters = model, converters
        tensors = model.state_dict()
        check_fit(source.specs, tensors)
        modules = dict(converted_modules(model))
        kept = [m for m in modules.values() if any(row.part for row in m.derived.values())]
        if kept:
            logger.info(
                "adapters are merged into wide weights: %d layers are dequantized from few bits",
                len(kept),
            )
        members: dict[str, list[str]] = {}
        for name in tensors:
            members.setdefault(_split(name)[0], []).append(name)
        specs: dict[str, TensorSpec] = {}
        recipes: list[Recipe] = []
        for prefix, names in members.items():
            if prefix in modules:
                plain_specs, recipe = _make_recipe(prefix, modules[prefix], names, source.specs)
                specs |= plain_specs
                recipes.append(recipe)
            else:
                specs |= {name: source.specs[name] for name in names}
                recipes += [Recipe([name], [name], None) for name in names]
        super().__init__(source, specs, recipes)

    def write_extra_files(self, folder: Path, spec: ModelSpec) -> None:
        """Write the converters' additional files next to the plain model in Hugging Face format."""
        for converter in self._converters:
            converter.write_export_files(folder, spec, self._model, self._source.read)


def _make_recipe(
    prefix: str, module: ConvertedModule, inputs: Sequence[str], specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, TensorSpec], Recipe]:
    """Return the specs of the plain module's tensors, and the recipe that computes them from the
    converted module's tensors `inputs`."""

    def add_names(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {_split(name)[1]: tensor for name, tensor in zip(inputs, tensors, strict=True)}

    state = add_names([specs[name].on_meta() for name in inputs])
    plain, types = module.plain_state(state), module.plain_types(state)
    plain_specs = {
        _join(prefix, name): TensorSpec(tensor.shape, types[name]) for name, tensor in plain.items()
    }
    return plain_specs, Recipe(
        inputs, list(plain_specs), lambda tensors: module.plain_state(add_names(tensors)).values()
    )


class ConvertedView(TensorSource):
    """Tensors of a converted model, except the `added` ones, computed from the plain model in
    `source`. `model` is the converted model on the meta device. Only the requested rows of a
    derived tensor are computed, from the same rows of the plain tensor."""

    def __init__(self, source: TensorSource, model: nn.Module):
        self._source = source
        self._parts = {"": source}
        self._derived: dict[str, tuple[str, DerivedRows]] = {}
        specs: dict[str, TensorSpec] = {}
        modules = dict(converted_modules(model))
        for name, tensor in model.state_dict().items():
            prefix, suffix = _split(name)
            module = modules.get(prefix)
            if module is not None and suffix in module.derived:
                rows = module.derived[suffix]
                plain = _join(prefix, rows.plain)
                if rows.part and source.forms.get(plain) != rows.form:
                    found = source.forms.get(plain, "wide")
                    raise UserError(
                        f"{plain} must be stored in few bits as {rows.form}, as it was published, "
                        f"but it is {found}; load the weights that the run started from, or "
                        "quantize these in a new run (--model_converters.qlora.base nf4)"
                    )
                if rows.part not in self._parts:
                    self._parts[rows.part] = source.of_part(rows.part)
                self._derived[name] = (plain, rows)
                specs[name] = TensorSpec.of(tensor)
            elif module is None or suffix not in module.added:
                specs[name] = source.specs[name]
        self.specs = specs

    @torch.no_grad()
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name not in self._derived:
            return self._source.read(name, slices)
        plain, derived = self._derived[name]
        rows, *columns = slices or full_slices(self.specs[name].shape)
        n_rows = max(1, _COMPUTED_ELEMENTS // derived.shape[1:].numel())
        # Views read experts alone, but other matrices whole.
        n_read = n_rows if len(derived.shape) > 2 else rows.stop - rows.start
        parts = []
        for start in range(rows.start, rows.stop, n_read):
            some = (slice(start, min(start + n_read, rows.stop)), *full_slices(derived.shape)[1:])
            for part in self._parts[derived.part].read(plain, some).split(n_rows):
                try:
                    values = derived.from_rows(part if derived.part else part.float())
                except ValueError as error:
                    raise UserError(f"{plain} cannot be kept in few bits: {error}") from None
                parts.append(values[(slice(None), *columns)])
        return torch.cat(parts)


def _split(name: str) -> tuple[str, str]:
    prefix, _, suffix = name.rpartition(".")
    return prefix, suffix


def _join(prefix: str, suffix: str) -> str:
    return f"{prefix}.{suffix}" if prefix else suffix


class LiveSource(TensorSource):
    """Tensors of a model, on its device. All ranks read them in the same order, since DTensors are
    gathered."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        self._tensors = tensors

    @torch.no_grad()
    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        whole = tensor.full_tensor() if is_dtensor(tensor) else tensor
        return whole if slices is None else whole[slices]


class ChainedSource(TensorSource):
    """All tensors of `first`, and the tensors of `other` that are not in `first`."""

    def __init__(self, first: TensorSource, other: TensorSource):
        self._first, self._other = first, other
        self.specs = {**other.specs, **first.specs}
        self.forms = {**other.forms, **first.forms}
        self.reasons = {**other.reasons, **first.reasons}

    def of_part(self, part: str) -> TensorSource:
        return ChainedSource(self._first.of_part(part), self._other.of_part(part))

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        source = self._first if name in self._first.specs else self._other
        return source.read(name, slices)


class ResizedEmbedding(TensorSource):
    """Tensors of `source` (our names and layout). In the tensors `names`, which have a row per
    token, the rows of `added` ids are the mean of the preceding rows. A tensor with too few rows
    for the first id is unchanged.

    Existing rows of `added` ids are padding, since published vocabularies are rounded up to a
    multiple. With the mean, a new token gets the logit of an average token, so the loss hardly
    changes (J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021).
    """

    def __init__(self, source: TensorSource, names: Collection[str], added: range):
        self._source, self._added = source, added
        self.forms, self.reasons = source.forms, source.reasons
        known = sorted(name for name in names if name in source.specs)
        self._names = [name for name in known if source.specs[name].shape[0] >= added.start]
        self.specs = dict(source.specs)
        for name in self._names:
            shape, dtype = source.specs[name].shape, source.specs[name].dtype
            self.specs[name] = TensorSpec(
                torch.Size([max(shape[0], added.stop), *shape[1:]]), dtype
            )

    def of_part(self, part: str) -> TensorSource:
        return self._source.of_part(part)

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
        """Return the mean of the rows before the added tokens, summed in float64 in chunks of
        rows."""
        total = torch.zeros([part.stop - part.start for part in columns], dtype=torch.float64)
        for start in range(0, self._added.start, _READ_ROWS):
            rows = slice(start, min(start + _READ_ROWS, self._added.start))
            total += self._source.read(name, (rows, *columns)).sum(dim=0, dtype=torch.float64)
        return (total / self._added.start).to(self.specs[name].dtype)


def with_new_score(source: TensorSource, shape: torch.Size) -> TensorSource:
    """Return the tensors of a language model in Hugging Face format, with a score of 0 instead of
    its output head."""
    score = Recipe([], ["score.weight"], lambda tensors: [torch.zeros(shape)])
    new = View(source, {"score.weight": TensorSpec(shape, torch.float32)}, [score])
    return ChainedSource(
        new, RenamedView(source, lambda name: None if name == "lm_head.weight" else name)
    )
