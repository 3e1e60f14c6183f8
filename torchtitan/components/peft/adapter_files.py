"""Adapters in the format of Hugging Face's PEFT library: `adapter_model.safetensors`, whose tensors `adapter_tensors`
lists, and `adapter_config.json`."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.peft.adapter_tensors import (
    Entry,
    ExpertsEntry,
    FusedEntry,
    find_targets,
    make_entries,
    map_to_internal,
    module_of,
    refused_layers,
    rewritten_layers,
)
from torchtitan.components.weights import HuggingFaceSource
from torchtitan.components.weights.load import read_part
from torchtitan.components.weights.sources import ADAPTER_CONFIG
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import Identity
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

LoRAConfig = Any
"""A `LoRA.Config`, whose module imports this one."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = ADAPTER_CONFIG

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
        entries = make_entries(model, spec)
        if not check_adapter_config(folder, config, _patterns(entries, config)):
            fused = {name: entry for name, entry in entries.items() if isinstance(entry, FusedEntry)}
            entries |= {name: replace(entry, is_shared=True) for name, entry in fused.items()}
        self._file = HuggingFaceSource(folder, WEIGHTS)
        _check_layers(folder, config.option, self._file.specs, entries.values(), spec)
        self._entries = {name: entry for name, entry in entries.items() if entry.key in self._file.specs}
        self.specs = {
            name: TensorSpec(entry.shape, self._file.specs[entry.key].dtype) for name, entry in self._entries.items()
        }
        self.base = {name for name, entry in self._entries.items() if entry.is_base}
        """Names of base weights in `specs`; PEFT saves some of them."""

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entries[name]
        is_same = entry.transform == Identity() or (entry.rows is None and entry.transform.rows_only)
        if is_same and not isinstance(entry, ExpertsEntry):
            return self._file.read(entry.key, slices)
        tensor = entry.to_internal(self._file.read(entry.key))
        return tensor if slices is None else tensor[slices]


def write_adapter(
    folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec, read: Callable[[str], Tensor]
) -> None:
    """Write a model's adapter for `peft.PeftModel.from_pretrained(base, folder)`; `folder` is created if missing.

    `read` returns a full tensor of the converted model by name; other arguments are as in `AdapterSource`. Raise
    `UserError` if `folder` already has an adapter, if PEFT would open other layers, or if the family's Hugging Face
    format is missing, splits adapted layers, or fuses adapted layers with others.
    """
    from safetensors.torch import save

    if (folder / CONFIG).exists():
        raise UserError(f"{folder} already has the adapter of another converter")
    entries = {name: entry for name, entry in make_entries(model, spec).items() if not entry.is_base}
    parts_of: dict[str, list[str]] = {}
    for name, entry in entries.items():
        parts_of.setdefault(entry.key, []).append(name)
    tensors = {
        key: entries[parts[0]].to_external([read(name) for name in parts]).cpu().contiguous()
        for key, parts in parts_of.items()
    }
    if refused := refused_layers(entries.values(), spec):
        names = summarize_names(sorted(refused))
        raise UserError(f"PEFT does not open adapters of {names}; exclude them ({config.option}.exclude)")
    rewritten = rewritten_layers(entries.values(), spec)
    if rewritten and config.dora:
        names = summarize_names(sorted(rewritten))
        raise UserError(f"PEFT supports no DoRA of layers that it takes for experts: {names}")
    if rewritten and config.dropout:
        logger.warning(
            "%s has lora_dropout 0 in place of %s: PEFT has no dropout for layers that it takes for experts: %s",
            *(folder / CONFIG, config.dropout, summarize_names(sorted(rewritten))),
        )
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _whole_if_possible(config.alpha),
        "lora_dropout": 0.0 if rewritten else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "init_lora_weights": True,
        **find_targets(entries.values(), spec),
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
    ranks = Ranks.of_run()
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
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{config.option}.adapter_path: the folder '{folder}' has no {name}")
    option, file, document = config.option, folder / CONFIG, read_object(folder / CONFIG)
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
    part, values = read_part(source, name, tensor)
    if name not in source.base:
        part.copy_(values)
    elif not torch.allclose(values.float(), part.cpu().float(), rtol=_ROUNDING, atol=1e-6):
        raise UserError(f"the adapter was trained with another base model: its {name} differs from this model's")


def _patterns(entries: Mapping[str, Entry], config: LoRAConfig) -> dict[str, Any]:
    """Return PEFT's options for the ranks and scales of fused layers; none if there are no fused layers."""
    counts = {
        entry.module.rpartition(".")[2]: len(entry.widths)
        for entry in entries.values()
        if isinstance(entry, FusedEntry)
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


def _check_layers(
    folder: Path, option: str, saved: Mapping[str, TensorSpec], entries: Collection[Entry], spec: ModelSpec
) -> None:
    """Raise `UserError` if the adapter's file has other layers than the run, or missing or unexpected tensors, or
    tensors of the wrong shape or type."""
    expected = {entry.key: entry for entry in entries}
    run_modules = {module_of(entry.key) for entry in entries}
    saved_modules = {module_of(key) for key in saved}
    if run_modules != saved_modules:
        differences = {"only in the file": saved_modules - run_modules, "only in the run": run_modules - saved_modules}
        internal_names = map_to_internal(spec)
        described = "; ".join(
            f"{place}: {summarize_names(sorted(internal_names.get(name, name) for name in names))}"
            for place, names in differences.items()
            if names
        )
        raise UserError(f"{folder}: the adapter has other layers than {option}.include and exclude select: {described}")
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
