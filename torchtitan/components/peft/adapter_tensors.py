"""The tensors that PEFT's files have for the adapted layers of a model.

A PEFT adapter belongs to the Hugging Face model, so names and row order follow the family's table
of its class (`ExternalFormat.class_adapter`). With W = W₀ + s·B·A, a permutation of the rows of W
permutes the rows of B and the magnitudes, but not A; a permutation of its columns permutes the
columns of A. An embedding's rows are its tokens, which are the columns of its A.

If that model fuses several of our layers, PEFT has one adapter for them. Our adapters are written
as one of their summed rank: their A are stacked, and their B are the blocks of a block-diagonal B.
In an adapter that PEFT made, all parts share A, and each has its rows of B.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchtitan.components.peft.experts import AdaptedExperts
from torchtitan.components.peft.lora import AdaptedLayer
from torchtitan.components.peft.rewritten_names import REFUSED_NAMES, REWRITTEN_NAMES
from torchtitan.components.peft.routers import AdaptedRouter
from torchtitan.components.peft.sizes import Size
from torchtitan.components.weights.export import format_for
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.sharding import features_of
from torchtitan.protocols.state_dict_adapter import (
    Columns,
    Concatenated,
    Permuted,
    StateDictAdapter,
    TensorConversion,
    Transform,
    model_tensor_specs,
)
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError, summarize_names

_PREFIX = "base_model.model."
"""Prefix of all names in the weights file."""

_BASE = "base_layer.weight"
"""Base weight of an adapted layer, which PEFT also saves if the head or the embedding is
adapted."""

_LINEAR = {
    "weight": _BASE,
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
_EMBEDDING = {"weight": _BASE, "lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"}
"""Parameter of an adapted layer → its name in PEFT."""

_EXCHANGED = str.maketrans("AB", "BA")


@dataclass(frozen=True)
class Entry:
    """Tensor of an adapted layer in PEFT's files."""

    module: str
    """Name of the layer in Hugging Face's model."""
    key: str
    """Name of the tensor in the file."""
    shape: torch.Size
    """Shape of our tensor."""
    transform: Transform
    """Conversion between the layer's weights."""
    rows: int | None
    """Dimension that corresponds to the rows of the layer's weight, if any; or to its columns, if
    the formats order these differently."""
    layer: str
    """Our name of the layer, or of the experts' matrix."""
    size: Size
    """Size of our adapter."""
    is_router: bool = field(default=False, kw_only=True)

    def file_size(self, rslora: bool) -> Size:
        """Return the size of the file's adapter."""
        return self.size

    @property
    def is_base(self) -> bool:
        """True for the layer's base weight."""
        return self.key.endswith(_BASE)

    @property
    def file_shape(self) -> torch.Size:
        """Shape of the file's tensor."""
        return self.to_external([torch.empty(self.shape, device="meta")]).shape

    def to_external(self, tensors: list[Tensor]) -> Tensor:
        """Return the file's tensor, in Hugging Face's row order, from ours."""
        (tensor,) = tensors
        if self.rows is None:
            return tensor
        (reordered,) = self.transform.to_external([tensor.movedim(self.rows, 0)])
        return reordered.movedim(0, self.rows)

    def to_internal(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file in our row order."""
        if self.rows is None:
            return tensor
        rows_first = tensor.movedim(self.rows, 0)
        (reordered,) = self.transform.to_internal([rows_first], [rows_first.shape])
        return reordered.movedim(0, self.rows)


@dataclass(frozen=True)
class FusedEntry(Entry):
    """Tensor of one of the layers, its parts, that Hugging Face's model fuses."""

    part: int
    """Number of the layer."""
    widths: tuple[int, ...]
    """Rows of all parts' weights."""
    is_shared: bool = False
    """True if all parts have the same A."""

    def file_size(self, rslora: bool) -> Size:
        if self.is_shared:
            return self.size
        n_parts = len(self.widths)
        return Size(
            n_parts * self.size.rank, self.size.alpha * (math.sqrt(n_parts) if rslora else n_parts)
        )

    @property
    def file_shape(self) -> torch.Size:
        n_ranks = 1 if self.is_shared else len(self.widths)
        if self.rows is None:
            return torch.Size((n_ranks * self.shape[0], self.shape[1]))
        return torch.Size((sum(self.widths), *(n_ranks * rank for rank in self.shape[1:])))

    def to_external(self, tensors: list[Tensor]) -> Tensor:
        if self.rows is None:
            return torch.cat(tensors)
        parts = list(tensors)
        if tensors[0].ndim == 2:  # B
            parts = list(torch.block_diag(*tensors).split(self.widths))
        (fused,) = self.transform.to_external(parts)
        return fused

    def to_internal(self, tensor: Tensor) -> Tensor:
        """Return this part. Raise `UserError` if a part's rows of B depend on another part's A."""
        n_parts = len(self.widths)
        if self.rows is None:
            return tensor if self.is_shared else tensor.chunk(n_parts)[self.part]
        shapes = [torch.Size((width, *tensor.shape[1:])) for width in self.widths]
        rows = self.transform.to_internal([tensor], shapes)[self.part]
        if self.is_shared or rows.ndim == 1:
            return rows
        blocks = list(rows.chunk(n_parts, dim=1))
        own = blocks.pop(self.part)
        if any(block.any() for block in blocks):
            raise UserError(
                f"{self.module} is {n_parts} layers here, and its adapter is not one of each: "
                f"{self.key} is not block-diagonal; a rank_pattern that gives these layers rank "
                f"{tensor.shape[1]} reads it"
            )
        return own


@dataclass(frozen=True)
class ExpertsEntry(Entry):
    """Tensor of experts' adapters, which PEFT has in one matrix for all experts. `module` is a
    parameter's name."""

    def to_external(self, tensors: list[Tensor]) -> Tensor:
        if self.rows is None:
            return tensors[0].flatten(0, 1)
        (lora_B,) = self.transform.to_external(tensors)
        return self._ranks_last(lora_B).permute(1, 2, 0).flatten(1)

    def to_internal(self, tensor: Tensor) -> Tensor:
        if self.rows is None:
            return tensor.view(self.shape)
        lora_B = tensor.unflatten(1, (-1, self.shape[0])).permute(2, 0, 1)
        return self.transform.to_internal([self._ranks_last(lora_B)], [self.shape])[0]

    def _ranks_last(self, lora_B: Tensor) -> Tensor:
        """Exchange the last dimensions of B (E, out, rank), in the file's layout, if weights there
        are transposed."""
        is_transposed = (
            isinstance(self.transform, Permuted) and self.transform.order[-1] != len(self.shape) - 1
        )
        return lora_B.mT if is_transposed else lora_B


@dataclass(frozen=True)
class ExchangedEntry(ExpertsEntry):
    """Tensor of experts whose weights (inputs, outputs) PEFT takes for (outputs, inputs): its B is
    our A, transposed, and the other way round."""

    def to_external(self, tensors: list[Tensor]) -> Tensor:
        if self.rows is None:
            return tensors[0].permute(2, 1, 0).flatten(1)
        (lora_B,) = self.transform.to_external(tensors)
        return self._ranks_last(lora_B).mT.flatten(0, 1)

    def to_internal(self, tensor: Tensor) -> Tensor:
        n_experts = self.shape[0]
        if self.rows is None:
            return tensor.unflatten(1, (-1, n_experts)).permute(2, 1, 0)
        lora_B = tensor.unflatten(0, (n_experts, -1)).mT
        return self.transform.to_internal([self._ranks_last(lora_B)], [self.shape])[0]


def make_entries(
    model: nn.Module, spec: ModelSpec, size_of: Callable[[str], Size]
) -> dict[str, Entry]:
    """Return the entry of each adapter tensor and base weight, with the parts of a fused layer in
    order. `size_of` returns the adapter size for a layer or an expert's matrix. Errors are as in
    `write_adapter`."""
    plain = model_tensor_specs(spec.model)
    modules = [
        (name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer)
    ]
    layers = {
        f"{name}.{own}": module
        for name, module in modules
        for own in getattr(module, "matrices", ["weight"])
    }
    entries: dict[str, Entry] = {}
    unsupported: list[str] = []
    for step in _class_adapter(spec).steps:
        adapted = [name for name in step.internal if name in layers]
        if adapted and isinstance(experts := layers[adapted[0]], AdaptedExperts):
            entries |= _expert_entries(adapted[0], experts, step, spec.name, size_of)
        elif adapted and (step.transform.rows_only or isinstance(step.transform, Columns)):
            (name,) = adapted
            layer_name = name.removesuffix(".weight")
            entries |= _make_layer_entries(
                layer_name, layers[name], step, plain[name].shape, size_of(layer_name)
            )
        elif len(adapted) == len(step.internal) and _fuses_rows(step.transform):
            entries |= _make_fused_entries(
                {name: layers[name] for name in adapted}, step, plain, size_of
            )
        elif adapted:
            unsupported.append(f"{', '.join(adapted)} ({', '.join(step.external)})")
    if unsupported:
        raise UserError(
            "PEFT files do not support adapters of weights that the Hugging Face format splits, "
            f"or fuses with weights that have no adapter: {summarize_names(unsupported)}"
        )
    return entries


def _fuses_rows(transform: Transform) -> bool:
    return isinstance(transform, Concatenated) and transform.dim == 0


def _class_adapter(spec: ModelSpec) -> StateDictAdapter:
    format = format_for(spec, "hf")
    # Transformers 5 has the experts of a layer in one tensor.
    return format.other_adapter(spec.model) or (format.class_adapter or format.adapter)(spec.model)


def _expert_entries(
    weight: str,
    experts: AdaptedExperts,
    step: TensorConversion,
    family: str,
    size_of: Callable[[str], Size],
) -> dict[str, Entry]:
    (parameter,), matrix = step.external, weight.rpartition(".")[2]
    if f"{matrix}_magnitude" in experts.adapter:
        raise UserError(f"PEFT files do not support DoRA of experts: {weight}")
    # PEFT wraps experts once for each adapted parameter, beginning with the first.
    outer = list(experts.matrices)[::-1].index(matrix)
    wrapper = parameter.rpartition(".")[0] + ".base_layer" * outer
    entries: dict[str, Entry] = {}
    # Llama 4's class does not say that its weights are (inputs, outputs).
    is_exchanged = family == "llama4"
    for part, rows in (("A", None), ("B", 1)):
        key = (
            f"{_PREFIX}{wrapper}.lora_{part.translate(_EXCHANGED) if is_exchanged else part}.weight"
        )
        shape = experts.get_parameter(f"{matrix}_{part}").shape
        entry_class = ExchangedEntry if is_exchanged else ExpertsEntry
        entries[f"{weight}_{part}"] = entry_class(
            parameter, key, shape, step.transform, rows, weight, size_of(weight)
        )
    return entries


def _make_fused_entries(
    layers: Mapping[str, AdaptedLayer],
    step: TensorConversion,
    plain: Mapping[str, TensorSpec],
    size_of: Callable[[str], Size],
) -> dict[str, Entry]:
    widths = tuple(plain[name].shape[0] for name in layers)
    sizes = {name: size_of(name.removesuffix(".weight")) for name in layers}
    if len(set(sizes.values())) > 1:
        raise UserError(
            "PEFT files need the same rank and alpha for layers that the Hugging Face format "
            f"fuses: {', '.join(sizes)}"
        )
    return {
        name: FusedEntry(**vars(entry), part=part, widths=widths)
        for part, (weight, layer) in enumerate(layers.items())
        for name, entry in _make_layer_entries(
            weight.removesuffix(".weight"), layer, step, plain[weight].shape, sizes[weight]
        ).items()
        if not entry.is_base  # PEFT saves base weights only of heads and embeddings
    }


def _make_layer_entries(
    name: str, layer: AdaptedLayer, step: TensorConversion, plain_shape: torch.Size, size: Size
) -> dict[str, Entry]:
    features = features_of(layer)
    keys = _EMBEDDING if isinstance(layer, nn.Embedding) else _LINEAR
    shapes = {parameter: layer.get_parameter(parameter).shape for parameter in layer.adapter}
    (ordered, columns), module = features["weight"], step.external[0].removesuffix(".weight")
    transform = step.transform
    if isinstance(transform, Columns):
        ordered, transform = columns, transform.of_rows
    entries: dict[str, Entry] = {}
    # a 4-bit layer has no parameter `weight`
    for parameter, shape in {**shapes, "weight": plain_shape}.items():
        rows = features[parameter].index(ordered) if ordered in features[parameter] else None
        key = f"{_PREFIX}{module}.{keys[parameter]}"
        is_router = isinstance(layer, AdaptedRouter)
        entries[f"{name}.{parameter}"] = Entry(
            module, key, shape, transform, rows, name, size, is_router=is_router
        )
    return entries


def map_to_internal(spec: ModelSpec) -> dict[str, str]:
    """Return Hugging Face's layer name → our name (or multiple names for a fused layer)."""
    steps = _class_adapter(spec).steps
    return {
        external.removesuffix(".weight"): " and ".join(
            internal.removesuffix(".weight") for internal in step.internal
        )
        for step in steps
        for external in step.external
    }


def module_of(key: str) -> str:
    """Return the layer of a tensor in an adapter's file, or the recognizable part of its name."""
    suffixes = "|".join(re.escape(suffix) for suffix in {*_LINEAR.values(), *_EMBEDDING.values()})
    return re.sub(rf"\.({suffixes})$", "", key.removeprefix(_PREFIX))


def parameter_layers(entries: Iterable[Entry], spec: ModelSpec) -> set[str]:
    """Return the layers, by Hugging Face's names, whose weights peft adapts as parameters: layers
    that it treats as experts if `target_modules` has them, and routers, because most routers are
    not linear layers there."""
    entries = list(entries)
    routers = {entry.module for entry in entries if entry.is_router}
    return _layers_named(REWRITTEN_NAMES, entries, spec) | routers


def refused_layers(entries: Iterable[Entry], spec: ModelSpec) -> set[str]:
    """Return the layers, by Hugging Face's names, that peft refuses to adapt in this model, or does
    not find again."""
    entries = list(entries)
    lost = _class_adapter(spec).lost_in_peft
    return _layers_named(REFUSED_NAMES, entries, spec) | {
        e.module for e in entries if f"{e.module}.weight" in lost
    }


def _layers_named(
    names_of_type: Mapping[str, frozenset[str]], entries: Iterable[Entry], spec: ModelSpec
) -> set[str]:
    """Return the layers whose last part is among the names of the model's type."""
    model_type = format_for(spec, "hf").to_external(spec.model).get("model_type")
    names = names_of_type.get(str(model_type), frozenset())
    layers = {entry.module for entry in entries if not isinstance(entry, ExpertsEntry)}
    return {layer for layer in layers if layer.rpartition(".")[2] in names}


def peft_sizes(entries: Collection[Entry], spec: ModelSpec, rslora: bool) -> dict[str, Size]:
    """Return the sizes of the file's adapters, by the names that PEFT's patterns match: of layers,
    or of parameters."""
    of_parameters = parameter_layers(entries, spec)
    return {
        f"{entry.module}.weight"
        if entry.module in of_parameters
        else entry.module: entry.file_size(rslora)
        for entry in entries
    }


def find_targets(entries: Collection[Entry], spec: ModelSpec) -> dict[str, list[str]]:
    """Return PEFT's `target_modules` and, if there are any, its `target_parameters`: parameters of
    experts, and the weights of `parameter_layers`."""
    of_parameters = parameter_layers(entries, spec)
    parameters = {entry.module for entry in entries if isinstance(entry, ExpertsEntry)}
    modules = {entry.module for entry in entries} - parameters - of_parameters
    parameters |= {f"{layer}.weight" for layer in of_parameters}
    return {
        "target_modules": _find_target_modules(modules, spec),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
    }


def _find_target_modules(adapted: set[str], spec: ModelSpec) -> list[str]:
    """Return PEFT's `target_modules`. The last part of a name matches all modules with this suffix;
    if only some of these are adapted, return the full names of the adapted modules."""
    names = [name.removesuffix(".weight") for name in _class_adapter(spec).external_names]
    # With modules that contain others: `layers.2` has the same last part as `layers.0.mlp.2`.
    modules_around = {
        around for name in names for around in itertools.accumulate(name.split("."), "{}.{}".format)
    }
    last_parts: dict[str, set[str]] = {}
    for module in modules_around:
        last_parts.setdefault(module.rpartition(".")[2], set()).add(module)
    targets: set[str] = set()
    for part, modules in last_parts.items():
        targets |= {part} if modules <= adapted else modules & adapted
    return sorted(targets)
