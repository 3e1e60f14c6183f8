"""Adapters in the format of Hugging Face's PEFT library: `adapter_model.safetensors` and `adapter_config.json`.

A PEFT adapter belongs to the Hugging Face model, so names and row order follow the family's table of its class
(`ExternalFormat.class_adapter`). With W = W₀ + s·B·A, a permutation of the rows of W permutes the rows of B and the
magnitudes, but not A. An embedding's rows are its tokens, which are the columns of its A.

If that model fuses several of our layers, PEFT has one adapter for them. Our adapters are written as one of their
summed rank: their A are stacked, and their B are the blocks of a block-diagonal B; `rank_pattern` and `alpha_pattern`
keep the scale. In an adapter that PEFT made, all parts share A, and each has its rows of B.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.peft.experts import AdaptedExperts
from torchtitan.components.peft.lora import AdaptedLayer
from torchtitan.components.weights import HuggingFaceSource
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.sources import ADAPTER_CONFIG
from torchtitan.config.configurable import config_key
from torchtitan.distributed.initialize import local_slices
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.sharding import features_of
from torchtitan.protocols.state_dict_adapter import (
    Concatenated,
    Identity,
    Permuted,
    StateDictAdapter,
    TensorConversion,
    Transform,
    model_tensor_specs,
)
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

LoRAConfig = Any
"""A `LoRA.Config`, whose module imports this one."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = ADAPTER_CONFIG

_PREFIX = "base_model.model."
"""Prefix of all names in the weights file."""

_BASE = "base_layer.weight"
"""Base weight of an adapted layer, which PEFT also saves if the head or the embedding is adapted."""

_LINEAR = {
    "weight": _BASE,
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
_EMBEDDING = {"weight": _BASE, "lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"}
"""Parameter of an adapted layer → its name in PEFT."""

_ROUNDING = 2**-6
"""Largest relative difference between 16-bit roundings of the same float32 number."""

_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "r": ("rank", 8),
    "lora_alpha": ("alpha", 8),
    "use_rslora": ("rslora", False),
    "use_dora": ("dora", False),
}
"""PEFT's option → field of `LoRA.Config`, and PEFT's default."""

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other values, such as "pissa", change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""PEFT's option → supported values."""

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # implied by the tensor names
    *("target_parameters", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""PEFT's options without effect on the output of a trained adapter. Any other option that is set is an error."""


@dataclass(frozen=True)
class _Entry:
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
    """Dimension that corresponds to the rows of the layer's weight, if any."""

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
class _FusedEntry(_Entry):
    """Tensor of one of the layers, its parts, that Hugging Face's model fuses."""

    part: int
    """Number of the layer."""
    widths: tuple[int, ...]
    """Rows of all parts' weights."""
    is_shared: bool = False
    """True if all parts have the same A."""

    @property
    def file_shape(self) -> torch.Size:
        n_ranks = 1 if self.is_shared else len(self.widths)
        if self.rows is None:
            return torch.Size((n_ranks * self.shape[0], self.shape[1]))
        return torch.Size((sum(self.widths), *(n_ranks * rank for rank in self.shape[1:])))

    def to_external(self, tensors: list[Tensor]) -> Tensor:
        is_lora_b = self.rows is not None and tensors[0].ndim == 2
        return torch.block_diag(*tensors) if is_lora_b else torch.cat(tensors)

    def to_internal(self, tensor: Tensor) -> Tensor:
        """Return this part. Raise `UserError` if a part's rows of B depend on another part's A."""
        n_parts = len(self.widths)
        if self.rows is None:
            return tensor if self.is_shared else tensor.chunk(n_parts)[self.part]
        rows = tensor.split(self.widths)[self.part]
        if self.is_shared or rows.ndim == 1:
            return rows
        blocks = list(rows.chunk(n_parts, dim=1))
        own = blocks.pop(self.part)
        if any(block.any() for block in blocks):
            raise UserError(
                f"{self.module} is {n_parts} layers here, and its adapter is not one of each: {self.key} is not "
                "block-diagonal"
            )
        return own


@dataclass(frozen=True)
class _ExpertsEntry(_Entry):
    """Tensor of experts' adapters, which PEFT has in one matrix for all experts. `module` is a parameter's name."""

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
        """Exchange the last dimensions of B (E, out, rank), in the file's layout, if weights there are transposed."""
        is_transposed = isinstance(self.transform, Permuted) and self.transform.order[-1] != len(self.shape) - 1
        return lora_B.mT if is_transposed else lora_B


class AdapterSource(TensorSource):
    """Tensors of an adapter in PEFT's files, under our names and in our layout.

    Args:
        folder: folder with the two files.
        config: configuration of the converter.
        model: the converted model on the meta device.
        spec: the plain model.

    Raises:
        UserError: if `check_adapter_config` raises it, the file is damaged, or layers or shapes differ.
    """

    def __init__(self, folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec):
        entries = _make_entries(model, spec)
        if not check_adapter_config(folder, config, _patterns(entries, config)):
            fused = {name: entry for name, entry in entries.items() if isinstance(entry, _FusedEntry)}
            entries |= {name: replace(entry, is_shared=True) for name, entry in fused.items()}
        self._file = _AdapterFile(folder)
        _check_layers(folder, config_key(config), self._file.specs, entries.values(), spec)
        self._entries = {name: entry for name, entry in entries.items() if entry.key in self._file.specs}
        self.specs = {
            name: TensorSpec(entry.shape, self._file.specs[entry.key].dtype) for name, entry in self._entries.items()
        }
        self.base = {name for name, entry in self._entries.items() if entry.is_base}
        """Names of base weights in `specs`; PEFT saves some of them."""

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entries[name]
        is_same = entry.transform == Identity() or (entry.rows is None and entry.transform.rows_only)
        if is_same and not isinstance(entry, _ExpertsEntry):
            return self._file.read(entry.key, slices)
        tensor = entry.to_internal(self._file.read(entry.key))
        return tensor if slices is None else tensor[slices]


class _AdapterFile(HuggingFaceSource):
    """Tensors of an adapter's file, under the file's names."""

    def __init__(self, folder: Path):
        self.path, self._files, self.specs = folder, {}, {}
        self._add(folder / WEIGHTS, None)


def write_adapter(
    folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec, read: Callable[[str], Tensor]
) -> None:
    """Write a model's adapter for `peft.PeftModel.from_pretrained(base, folder)`; `folder` is created if missing.

    `read` returns a full tensor of the converted model by name; other arguments are as in `AdapterSource`. Raise
    `UserError` if `folder` already has an adapter, or if the family's Hugging Face format is missing, splits adapted
    layers, or fuses adapted layers with others.
    """
    from safetensors.torch import save

    if (folder / CONFIG).exists():
        raise UserError(f"{folder} already has the adapter of another converter")
    entries = {name: entry for name, entry in _make_entries(model, spec).items() if not entry.is_base}
    names: dict[str, list[str]] = {}
    for name, entry in entries.items():
        names.setdefault(entry.key, []).append(name)
    tensors = {
        key: entries[parts[0]].to_external([read(name) for name in parts]).cpu().contiguous()
        for key, parts in names.items()
    }
    parameters = {entry.module for entry in entries.values() if isinstance(entry, _ExpertsEntry)}
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _whole_if_possible(config.alpha),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": _find_target_modules({entry.module for entry in entries.values()} - parameters, spec),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        **_patterns(entries, config),
    }
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    # `save_file` would create a file that other users cannot read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))


def read_adapter(
    folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec, model_parts: list[nn.Module]
) -> None:
    """Load an adapter from PEFT files into `model_parts`, this process's part of the materialized model, sharded or
    not, with base weights loaded. All processes of the default group call this together. Other arguments and errors are
    as in `AdapterSource`; also raise `UserError` if the base weights differ."""
    ranks = Ranks(dist.group.WORLD if dist.is_initialized() else None)
    tensors: dict[str, Tensor] = ModelState(model_parts).state_dict()

    def load() -> None:
        source = AdapterSource(folder, config, model, spec)
        for name in source.specs.keys() & tensors.keys():
            _load_part(source, name, tensors[name])

    ranks.all_ranks_or_raise(load)
    logger.info("loaded the adapter in %s", folder)


def check_adapter_config(folder: Path, config: LoRAConfig, patterns: Mapping[str, Any] | None = None) -> bool:
    """Return whether adapter_config.json has these `patterns` (`_patterns`). Raise `UserError` if a file is missing, or
    if adapter_config.json has unsupported or different options."""
    option = f"--model_converters.{config_key(config)}"
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{option}.adapter_path: the folder '{folder}' has no {name}")
    file, document = folder / CONFIG, read_object(folder / CONFIG)
    for key, supported in _SUPPORTED.items():
        if document.get(key, supported[0]) not in supported:
            raise UserError(f"{file}: {key} {document[key]!r} is not supported (only {supported[0]!r})")
    has_patterns = bool(patterns) and all(document.get(key) == value for key, value in (patterns or {}).items())
    known = {*_SETTINGS, *_SUPPORTED, *_WITHOUT_EFFECT, *((patterns or {}) if has_patterns else ())}
    if unsupported := sorted(f"{key} ({value!r})" for key, value in document.items() if value and key not in known):
        raise UserError(f"{file}: unsupported options: {summarize_names(unsupported)}")
    for key, (field, default) in _SETTINGS.items():
        saved, configured = document.get(key, default), getattr(config, field)
        if saved != configured:
            flag = field if saved is True else f"no_{field}" if saved is False else f"{field} {saved}"
            raise UserError(f"{file}: {key} is {saved}, but {option}.{field} is {configured}; set {option}.{flag}")
    return has_patterns


@torch.no_grad()
def _load_part(source: AdapterSource, name: str, tensor: Tensor) -> None:
    """Copy this process's shard of an adapter tensor, or compare its shard of a base weight."""
    slices: Slices | None = None
    if isinstance(tensor, DTensor):
        slices, tensor = local_slices(tensor), tensor.to_local()
    if not tensor.numel():
        return
    values = source.read(name, slices)
    if name not in source.base:
        tensor.copy_(values)
    elif not torch.allclose(values.float(), tensor.cpu().float(), rtol=_ROUNDING, atol=1e-6):
        raise UserError(f"the adapter was trained with another base model: its {name} differs from this model's")


def _make_entries(model: nn.Module, spec: ModelSpec) -> dict[str, _Entry]:
    """Return the entry of each adapter tensor and base weight, with the parts of a fused layer in order. Errors are as
    in `write_adapter`."""
    plain = model_tensor_specs(spec.model)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer)]
    layers = {f"{name}.{own}": module for name, module in modules for own in getattr(module, "matrices", ["weight"])}
    entries: dict[str, _Entry] = {}
    unsupported: list[str] = []
    for step in _class_adapter(spec).steps:
        adapted = [name for name in step.internal if name in layers]
        if adapted and isinstance(experts := layers[adapted[0]], AdaptedExperts):
            entries |= _expert_entries(adapted[0], experts, step, spec.name)
        elif adapted and step.transform.rows_only:
            (name,) = adapted
            entries |= _make_layer_entries(name.removesuffix(".weight"), layers[name], step, plain[name].shape)
        elif len(adapted) == len(step.internal) and step.transform == Concatenated(0):
            entries |= _make_fused_entries({name: layers[name] for name in adapted}, step, plain)
        elif adapted:
            unsupported.append(f"{', '.join(adapted)} ({', '.join(step.external)})")
    if unsupported:
        raise UserError(
            "PEFT files do not support adapters of weights that the Hugging Face format splits, or fuses with weights "
            f"that have no adapter: {summarize_names(unsupported)}"
        )
    return entries


def _class_adapter(spec: ModelSpec) -> StateDictAdapter:
    format = format_for(spec, "hf")
    # Transformers 5 has the experts of a layer in one tensor.
    return format.other_adapter(spec.model) or (format.class_adapter or format.adapter)(spec.model)


def _expert_entries(weight: str, experts: AdaptedExperts, step: TensorConversion, family: str) -> dict[str, _Entry]:
    (parameter,), matrix = step.external, weight.rpartition(".")[2]
    if family == "llama4" or f"{matrix}_magnitude" in experts.adapter:
        raise UserError(f"PEFT files do not support adapters of Llama 4's experts, or DoRA of experts: {weight}")
    # PEFT wraps experts once for each adapted parameter, beginning with the first.
    outer = list(experts.matrices)[::-1].index(matrix)
    wrapper = parameter.rpartition(".")[0] + ".base_layer" * outer
    return {
        f"{weight}_{part}": _ExpertsEntry(
            module=parameter,
            key=f"{_PREFIX}{wrapper}.lora_{part}.weight",
            shape=experts.get_parameter(f"{matrix}_{part}").shape,
            transform=step.transform,
            rows=None if part == "A" else 1,
        )
        for part in "AB"
    }


def _make_fused_entries(
    layers: Mapping[str, AdaptedLayer], step: TensorConversion, plain: Mapping[str, TensorSpec]
) -> dict[str, _Entry]:
    widths = tuple(plain[name].shape[0] for name in layers)
    return {
        name: _FusedEntry(**vars(entry), part=part, widths=widths)
        for part, (weight, layer) in enumerate(layers.items())
        for name, entry in _make_layer_entries(weight.removesuffix(".weight"), layer, step, plain[weight].shape).items()
        if not entry.is_base  # PEFT saves base weights only of heads and embeddings
    }


def _patterns(entries: Mapping[str, _Entry], config: LoRAConfig) -> dict[str, Any]:
    """Return PEFT's options for the ranks and scales of fused layers; none if there are no fused layers."""
    counts = {
        entry.module.rpartition(".")[2]: len(entry.widths)
        for entry in entries.values()
        if isinstance(entry, _FusedEntry)
    }
    if not counts:
        return {}
    return {
        "rank_pattern": {name: n_parts * config.rank for name, n_parts in counts.items()},
        "alpha_pattern": {
            name: _whole_if_possible(config.alpha * (math.sqrt(n_parts) if config.rslora else n_parts))
            for name, n_parts in counts.items()
        },
    }


def _whole_if_possible(number: float) -> float:
    return int(number) if number == int(number) else number


def _make_layer_entries(
    name: str, layer: AdaptedLayer, step: TensorConversion, plain_shape: torch.Size
) -> dict[str, _Entry]:
    features = features_of(layer)
    keys = _EMBEDDING if isinstance(layer, nn.Embedding) else _LINEAR
    shapes = {parameter: layer.get_parameter(parameter).shape for parameter in layer.adapter}
    (row_features, _), module = features["weight"], step.external[0].removesuffix(".weight")
    entries: dict[str, _Entry] = {}
    for parameter, shape in {**shapes, "weight": plain_shape}.items():  # a 4-bit layer has no parameter `weight`
        rows = features[parameter].index(row_features) if row_features in features[parameter] else None
        key = f"{_PREFIX}{module}.{keys[parameter]}"
        entries[f"{name}.{parameter}"] = _Entry(module, key, shape, step.transform, rows)
    return entries


def _check_layers(
    folder: Path, converter: str, saved: Mapping[str, TensorSpec], entries: Collection[_Entry], spec: ModelSpec
) -> None:
    """Raise `UserError` if the adapter's file has other layers than the run, or missing or unexpected tensors, or
    tensors of the wrong shape or type."""
    expected = {entry.key: entry for entry in entries}
    run_modules = {_module_of(entry.key) for entry in entries}
    saved_modules = {_module_of(key) for key in saved}
    if run_modules != saved_modules:
        differences = {"only in the file": saved_modules - run_modules, "only in the run": run_modules - saved_modules}
        internal_names = _map_to_internal(spec)
        described = "; ".join(
            f"{place}: {summarize_names(sorted(internal_names.get(name, name) for name in names))}"
            for place, names in differences.items()
            if names
        )
        raise UserError(
            f"{folder}: the adapter has other layers than --model_converters.{converter}.include and exclude select: "
            f"{described}"
        )
    faults = [f"{key} is missing" for key, entry in expected.items() if key not in saved and not entry.is_base]
    for key, tensor_spec in saved.items():
        if key not in expected:
            faults.append(f"{key} is unknown")
        elif tensor_spec.shape != expected[key].file_shape:
            faults.append(f"{key} has shape {list(tensor_spec.shape)} instead of {list(expected[key].file_shape)}")
        elif not (tensor_spec.dtype.is_floating_point and tensor_spec.dtype.itemsize >= 2):
            faults.append(f"{key} has type {str(tensor_spec.dtype).removeprefix('torch.')}")
    if faults:
        raise UserError(f"{folder / WEIGHTS} does not fit the model: {summarize_names(faults)}")


def _map_to_internal(spec: ModelSpec) -> dict[str, str]:
    """Return Hugging Face's layer name → our name (or multiple names for a fused layer)."""
    steps = _class_adapter(spec).steps
    return {
        external.removesuffix(".weight"): " and ".join(internal.removesuffix(".weight") for internal in step.internal)
        for step in steps
        for external in step.external
    }


def _module_of(key: str) -> str:
    """Return the layer of a tensor in an adapter's file, or the recognizable part of its name."""
    suffixes = "|".join(re.escape(suffix) for suffix in {*_LINEAR.values(), *_EMBEDDING.values()})
    return re.sub(rf"\.({suffixes})$", "", key.removeprefix(_PREFIX))


def _find_target_modules(adapted: set[str], spec: ModelSpec) -> list[str]:
    """Return PEFT's `target_modules`. The last part of a name matches all layers with this suffix; if only some of them
    are adapted, return their full names."""
    weights = _class_adapter(spec).external_names
    last_parts: dict[str, set[str]] = {}
    for module in (name.removesuffix(".weight") for name in weights):
        last_parts.setdefault(module.rpartition(".")[2], set()).add(module)
    targets: set[str] = set()
    for part, modules in last_parts.items():
        targets |= {part} if modules <= adapted else modules & adapted
    return sorted(targets)
