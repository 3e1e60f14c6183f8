"""Adapters in the format of Hugging Face's PEFT library: `adapter_model.safetensors` and `adapter_config.json`.

Names and rows follow the family's table (`ExternalFormat.adapter`), since such an adapter belongs to the model in
Hugging Face's format. With W = W₀ + s·B·A, a permutation of the rows of W permutes the rows of B and the magnitudes,
but not A. An embedding's rows are its tokens, which are the columns of its A.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.peft.lora import AdaptedLayer
from torchtitan.components.weights import HuggingFaceSource
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.load import local_slices
from torchtitan.components.weights.sources import ADAPTER_CONFIG
from torchtitan.config.configurable import config_key
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.sharding import features_of
from torchtitan.protocols.state_dict_adapter import Identity, TensorConversion, Transform, model_tensor_specs
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

LoRAConfig = Any
"""A `LoRA.Config`, whose module imports this one."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = ADAPTER_CONFIG

_PREFIX = "base_model.model."
"""Prefix of every name in the file of weights."""

_BASE = "base_layer.weight"
"""Weight below an adapter, which PEFT also saves if the head or the embedding is adapted."""

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

_POSSIBLE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others, such as "pissa", change the weights below the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""PEFT's option → supported values."""

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the names in the file say it
    *("lora_dropout", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""PEFT's options without effect on the output of a trained adapter. Any other option that is set is refused."""


@dataclass(frozen=True)
class _Entry:
    """Tensor of an adapted layer in PEFT's files."""

    module: str
    """Name of the layer in Hugging Face's model."""
    key: str
    """Name of the tensor in the file."""
    shape: torch.Size
    """Shape in both formats."""
    transform: Transform
    """Conversion between the layer's weights."""
    rows: int | None
    """Dimension that runs over the rows of the layer's weight, if any."""

    @property
    def is_base(self) -> bool:
        """True for the weight below the adapter."""
        return self.key.endswith(_BASE)

    def to_external(self, tensor: Tensor) -> Tensor:
        """Return our tensor in the order of Hugging Face's weight."""
        if self.rows is None:
            return tensor
        (moved,) = self.transform.to_external([tensor.movedim(self.rows, 0)])
        return moved.movedim(0, self.rows)

    def to_internal(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file in the order of our weight."""
        if self.rows is None:
            return tensor
        rows_first = tensor.movedim(self.rows, 0)
        (moved,) = self.transform.to_internal([rows_first], [rows_first.shape])
        return moved.movedim(0, self.rows)


class AdapterSource(TensorSource):
    """Tensors of an adapter in PEFT's files, under our names and in our layout.

    Args:
        folder: holds the two files.
        config: of the converter of `model`.
        model: the converted model, on the meta device.
        spec: the plain model.

    Raises:
        UserError: as `check_adapter_config`; for a damaged file, or an adapter of other layers or sizes, by name.
    """

    def __init__(self, folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec):
        check_adapter_config(folder, config)
        self._file = _AdapterFile(folder)
        entries = _entries(model, spec)
        _check_layers(folder, config_key(config), self._file.specs, entries.values(), spec)
        self._entries = {name: entry for name, entry in entries.items() if entry.key in self._file.specs}
        self.specs = {name: self._file.specs[entry.key] for name, entry in self._entries.items()}
        self.base = {name for name, entry in self._entries.items() if entry.is_base}
        """Weights among `specs` that are below the adapter, some of which PEFT saves too."""

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entries[name]
        if entry.rows is None or entry.transform == Identity():
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

    `read` returns a whole tensor of the converted model by name; other arguments are as in `AdapterSource`. Raise
    `UserError` if the family has no Hugging Face format, or one that fuses adapted layers; for a second adapter.
    """
    from safetensors.torch import save

    if (folder / CONFIG).exists():
        raise UserError(f"{folder} has an adapter already, that of another converter")
    entries = {name: entry for name, entry in _entries(model, spec).items() if not entry.is_base}
    tensors = {entry.key: entry.to_external(read(name)).cpu().contiguous() for name, entry in entries.items()}
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": _targets({entry.module for entry in entries.values()}, spec),
    }
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    # `save_file` would create a file that other users cannot read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))


def read_adapter(
    folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec, model_parts: list[nn.Module]
) -> None:
    """Load an adapter in PEFT's files into `model_parts`, the model in this process with the plain model's weights
    (materialized, sharded or not), each process of the default group its part. Other arguments are as in
    `AdapterSource`. Raise `UserError` on every process as there, or if the weights below the adapter differ."""
    ranks = Ranks(dist.group.WORLD if dist.is_initialized() else None)
    tensors: dict[str, Tensor] = ModelState(model_parts).state_dict()

    def load() -> None:
        source = AdapterSource(folder, config, model, spec)
        for name in source.specs.keys() & tensors.keys():
            _load_part(source, name, tensors[name])

    ranks.all_ranks_or_raise(load)
    logger.info("loaded %s, an adapter", folder)


def check_adapter_config(folder: Path, config: LoRAConfig) -> None:
    """Raise `UserError` if a file is missing, or its adapter_config.json has unsupported or different options."""
    option = f"--model_converters.{config_key(config)}"
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{option}.adapter_path: there is no {name} in the folder '{folder}'")
    file, document = folder / CONFIG, read_object(folder / CONFIG)
    for key, possible in _POSSIBLE.items():
        if document.get(key, possible[0]) not in possible:
            raise UserError(f"{file}: {key} is {document[key]!r}, which is not supported (only {possible[0]!r})")
    known = {*_SETTINGS, *_POSSIBLE, *_WITHOUT_EFFECT}
    if unsupported := sorted(f"{key} ({value!r})" for key, value in document.items() if value and key not in known):
        raise UserError(f"{file}: the adapter has what is not supported: {summarize_names(unsupported)}")
    for key, (field, default) in _SETTINGS.items():
        theirs, ours = document.get(key, default), getattr(config, field)
        if theirs != ours:
            flag = field if theirs is True else f"no_{field}" if theirs is False else f"{field} {theirs}"
            raise UserError(f"{file}: {key} is {theirs}, and {option}.{field} is {ours}: give {option}.{flag}")


@torch.no_grad()
def _load_part(source: AdapterSource, name: str, tensor: Tensor) -> None:
    """Copy this process's part of a tensor; for a weight below the adapter, compare it."""
    slices: Slices | None = None
    if isinstance(tensor, DTensor):
        slices, tensor = local_slices(tensor), tensor.to_local()
    if not tensor.numel():
        return
    values = source.read(name, slices)
    if name not in source.base:
        tensor.copy_(values)
    elif not torch.allclose(values.float(), tensor.cpu().float(), rtol=_ROUNDING, atol=1e-6):
        raise UserError(f"the adapter was trained on top of another model: the {name} in its file is not this model's")


def _entries(model: nn.Module, spec: ModelSpec) -> dict[str, _Entry]:
    """Return the entry of each adapter tensor and each weight below; raise as `write_adapter`."""
    steps = {name: step for step in format_for(spec, "hf").adapter(spec.model).steps for name in step.internal}
    plain = model_tensor_specs(spec.model)
    entries: dict[str, _Entry] = {}
    fused: list[str] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, AdaptedLayer):
            continue
        step = steps[f"{name}.weight"]
        if step.transform.rows_only:
            entries |= _entries_of(name, layer, step, plain[f"{name}.weight"].shape)
        else:
            fused.append(f"{name}.weight ({', '.join(step.external)})")
    if fused:
        raise UserError(
            "PEFT's files cannot hold adapters of weights that Hugging Face's format fuses or splits: "
            + summarize_names(fused)
        )
    return entries


def _entries_of(name: str, layer: AdaptedLayer, step: TensorConversion, plain_shape: torch.Size) -> dict[str, _Entry]:
    features = features_of(layer)
    keys = _EMBEDDING if isinstance(layer, nn.Embedding) else _LINEAR
    shapes = {own: layer.get_parameter(own).shape for own in layer.adapter}
    (row_features, _), module = features["weight"], step.external[0].removesuffix(".weight")
    entries: dict[str, _Entry] = {}
    for own, shape in {**shapes, "weight": plain_shape}.items():  # where the weight is in 4 bits too
        rows = features[own].index(row_features) if row_features in features[own] else None
        key = f"{_PREFIX}{module}.{keys[own]}"
        entries[f"{name}.{own}"] = _Entry(module, key, shape, step.transform, rows)
    return entries


def _check_layers(
    folder: Path, converter: str, found: Mapping[str, TensorSpec], entries: Collection[_Entry], spec: ModelSpec
) -> None:
    """Raise `UserError` naming the layers, as in `include`, or the tensors in an adapter's file that are missing,
    surplus, or of another shape or type."""
    expected = {entry.key: entry for entry in entries}
    ours = {entry.module for entry in entries}
    theirs = {_module_of(key) for key in found}
    if ours != theirs:
        differences = {"only in the file": theirs - ours, "only in the run": ours - theirs}
        own = _own_names(spec)
        listed = "; ".join(
            f"{where}: {summarize_names(sorted(own.get(name, name) for name in names))}"
            for where, names in differences.items()
            if names
        )
        raise UserError(
            f"{folder}: the adapter is of other layers than --model_converters.{converter}.include and exclude choose: "
            f"{listed}"
        )
    faults = [f"{entry.key} is missing" for entry in entries if entry.key not in found and not entry.is_base]
    for key, tensor_spec in found.items():
        if key not in expected:
            faults.append(f"{key} is not known")
        elif tensor_spec.shape != expected[key].shape:
            faults.append(f"{key} is {list(tensor_spec.shape)} and must be {list(expected[key].shape)}")
        elif not (tensor_spec.dtype.is_floating_point and tensor_spec.dtype.itemsize >= 2):
            faults.append(f"{key} is of type {str(tensor_spec.dtype).removeprefix('torch.')}")
    if faults:
        raise UserError(f"{folder / WEIGHTS} does not fit the model: {summarize_names(faults)}")


def _own_names(spec: ModelSpec) -> dict[str, str]:
    """Return layer of Hugging Face's model → our name; several if it is fused from them."""
    steps = format_for(spec, "hf").adapter(spec.model).steps
    return {
        external.removesuffix(".weight"): " and ".join(internal.removesuffix(".weight") for internal in step.internal)
        for step in steps
        for external in step.external
    }


def _module_of(key: str) -> str:
    """Return the layer of a tensor in an adapter's file, or the recognizable part of its name."""
    suffixes = "|".join(re.escape(suffix) for suffix in {*_LINEAR.values(), *_EMBEDDING.values()})
    return re.sub(rf"\.({suffixes})$", "", key.removeprefix(_PREFIX))


def _targets(adapted: set[str], spec: ModelSpec) -> list[str]:
    """Return PEFT's `target_modules`: the last part of the adapted layers' names, which matches all layers that end in
    it, or their full names if only some of these are adapted."""
    weights = format_for(spec, "hf").adapter(spec.model).external_names
    last_parts: dict[str, set[str]] = {}
    for module in (name.removesuffix(".weight") for name in weights):
        last_parts.setdefault(module.rpartition(".")[2], set()).add(module)
    targets: set[str] = set()
    for part, modules in last_parts.items():
        targets |= {part} if modules <= adapted else modules & adapted
    return sorted(targets)
