"""Adapters in the format of Hugging Face's PEFT library: `adapter_model.safetensors`, whose tensors
`adapter_tensors` lists, and `adapter_config.json`."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.components.checkpoint.formats import ADAPTER_CONFIG, LIBRARIES
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.checkpoint.torchtune_files import adapter_in
from torchtitan.components.peft.adapter_tensors import (
    Entry,
    ExpertsEntry,
    FusedEntry,
    find_targets,
    make_entries,
    map_to_internal,
    module_of,
    parameter_layers,
    peft_sizes,
    refused_layers,
)
from torchtitan.components.peft.sizes import Size, find_patterns, look_up
from torchtitan.components.weights import HuggingFaceSource, torchtune
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.load import read_part
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import Identity
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger

LoRAConfig = Any
"""A `LoRA.Config`, whose module imports this one."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = ADAPTER_CONFIG

_ROUNDING = 2**-6
"""Largest relative difference between 16-bit roundings of the same float32 number."""

_SETTINGS: Mapping[str, tuple[str, object]] = {
    "r": ("rank", 8),
    "lora_alpha": ("alpha", 8),
    "use_rslora": ("rslora", False),
    "use_dora": ("dora", False),
}
"""PEFT's option → field of `LoRA.Config`, and PEFT's default."""

_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other values, such as "pissa", change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""PEFT's option → supported values."""

_PATTERNS = ("rank_pattern", "alpha_pattern")
"""PEFT's options for the sizes of single layers."""

_WITHOUT_EFFECT = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
    ),
    # implied by the tensor names
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *(
        "target_parameters",
        "lora_dropout",
        "eva_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
    ),
}
"""PEFT's options without effect on the output of a trained adapter. Any other option that is set is
an error."""


class AdapterSource(TensorSource):
    """Tensors of an adapter in PEFT's or torchtune's files, under our names and in our layout.

    Args:
        folder: folder with the files.
        config: configuration of the converter.
        model: the converted model on the meta device.
        spec: the plain model.

    Raises:
        UserError: if `check_adapter_config` raises it, the file is damaged, or layers or shapes
            differ.
    """

    def __init__(self, folder: Path, config: LoRAConfig, model: nn.Module, spec: ModelSpec):
        self._file, document = _open(folder, config, spec)
        entries = _with_sizes_of_file(
            folder, config, document, make_entries(model, spec, config.size_of)
        )
        _check_layers(folder, config.option, self._file.specs, entries.values(), spec)
        self._entries = {
            name: entry for name, entry in entries.items() if entry.key in self._file.specs
        }
        self.specs = {
            name: TensorSpec(entry.shape, self._file.specs[entry.key].dtype)
            for name, entry in self._entries.items()
        }
        self.base = {name for name, entry in self._entries.items() if entry.is_base}
        """Names of base weights in `specs`; PEFT saves some of them."""

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        entry = self._entries[name]
        is_same = entry.transform == Identity() or (
            entry.rows is None and entry.transform.rows_only
        )
        if is_same and not isinstance(entry, ExpertsEntry):
            return self._file.read(entry.key, slices)
        tensor = entry.to_internal(self._file.read(entry.key))
        return tensor if slices is None else tensor[slices]


def write_adapter(
    folder: Path,
    config: LoRAConfig,
    model: nn.Module,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
) -> None:
    """Write a model's adapter for `peft.PeftModel.from_pretrained(base, folder)`; `folder` is
    created if missing.

    `read` returns a full tensor of the converted model by name; other arguments are as in
    `AdapterSource`. Raise `UserError` if `folder` already has an adapter, if PEFT would open other
    layers, or if the family's Hugging Face format is missing, splits adapted layers, or fuses
    adapted layers with others.
    """
    from safetensors.torch import save

    if (folder / CONFIG).exists():
        raise UserError(f"{folder} already has the adapter of another converter")
    entries = {
        name: entry
        for name, entry in make_entries(model, spec, config.size_of).items()
        if not entry.is_base
    }
    parts_of: dict[str, list[str]] = {}
    for name, entry in entries.items():
        parts_of.setdefault(entry.key, []).append(name)
    tensors = {
        key: entries[parts[0]].to_external([read(name) for name in parts]).cpu().contiguous()
        for key, parts in parts_of.items()
    }
    if refused := refused_layers(entries.values(), spec):
        names = summarize_names(sorted(refused))
        raise UserError(
            f"PEFT does not open adapters of {names}; exclude them ({config.option}.exclude)"
        )
    of_parameters = parameter_layers(entries.values(), spec)
    if of_parameters and config.dora:
        names = summarize_names(sorted(of_parameters))
        raise UserError(f"PEFT supports no DoRA of layers that it adapts as parameters: {names}")
    if of_parameters and config.dropout:
        logger.warning(
            "%s has lora_dropout 0 in place of %s: PEFT has no dropout for layers that it adapts "
            "as parameters: %s",
            *(folder / CONFIG, config.dropout, summarize_names(sorted(of_parameters))),
        )
    document = {
        "peft_type": "LORA",
        "task_type": _task_type(spec),
        "base_model_name_or_path": config.base_in_peft,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _whole_if_possible(config.alpha),
        "lora_dropout": 0.0 if of_parameters else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "init_lora_weights": True,
        **find_targets(entries.values(), spec),
        **_patterns(entries.values(), config, spec),
    }
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    # `save_file` would create a file that other users cannot read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))


def _task_type(spec: ModelSpec) -> str | None:
    # PEFT's class for SEQ_CLS would look for whole weights of the score in the file, and that for
    # CAUSAL_LM needs a class of transformers.
    has_text = LIBRARIES[format_for(spec, "hf").library].has_text
    return "CAUSAL_LM" if has_text and not spec.model.scores else None


def read_adapter(
    folder: Path,
    config: LoRAConfig,
    model: nn.Module,
    spec: ModelSpec,
    model_parts: list[nn.Module],
) -> None:
    """Load an adapter from PEFT files into `model_parts`, this process's part of the materialized
    model, sharded or not, with base weights loaded. All processes of the default group call this
    together. Other arguments and errors are as in `AdapterSource`; also raise `UserError` if the
    base weights differ."""
    ranks = Ranks.of_run()
    tensors: dict[str, Tensor] = ModelState(model_parts).state_dict()

    def load() -> None:
        source = AdapterSource(folder, config, model, spec)
        for name in source.specs.keys() & tensors.keys():
            _load_part(source, name, tensors[name])

    ranks.all_ranks_or_raise(load)
    logger.info("loaded the adapter in %s", folder)


def _open(
    folder: Path, config: LoRAConfig, spec: ModelSpec
) -> tuple[TensorSource, dict[str, object]]:
    """Return an adapter's tensors, with the names of PEFT's file, and adapter_config.json."""
    own = None if (folder / WEIGHTS).is_file() else adapter_in(folder)
    if own is None:
        document = check_adapter_config(folder, config)
        return HuggingFaceSource(folder, WEIGHTS), document
    weights = torchtune.TorchtuneAdapter(own, format_for(spec, "hf").to_external(spec.model))
    has_config = (folder / CONFIG).is_file()
    document = (
        read_object(folder / CONFIG) if has_config else _implied_config(own, config, weights.specs)
    )
    _check_options(folder / CONFIG if has_config else own, document, config)
    return weights, document


def _implied_config(
    file: Path, config: LoRAConfig, specs: Mapping[str, TensorSpec]
) -> dict[str, object]:
    """Return the settings that the tensors `specs` of torchtune's adapter show, without an
    adapter_config.json; they do not show alpha."""
    logger.warning(
        "%s has no %s next to it: %s.alpha %g must be the alpha of its training",
        *(file, CONFIG, config.option, config.alpha),
    )
    ranks = [tensor.shape[0] for name, tensor in specs.items() if name.endswith("lora_A.weight")]
    return {
        "r": ranks[0] if ranks else config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": False,
        "use_dora": any(name.endswith("lora_magnitude_vector") for name in specs),
    }


def check_adapter_config(folder: Path, config: LoRAConfig) -> dict[str, object]:
    """Return adapter_config.json. Raise `UserError` if a file is missing, or if adapter_config.json
    has unsupported or different options. The sizes of single layers are not compared."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{config.option}.adapter_path: the folder '{folder}' has no {name}")
    document = read_object(folder / CONFIG)
    _check_options(folder / CONFIG, document, config)
    return document


def _check_options(file: Path, document: Mapping[str, object], config: LoRAConfig) -> None:
    """Raise `UserError` for unsupported options, or others than the run's."""
    option = config.option
    for key, supported in _SUPPORTED.items():
        if document.get(key, supported[0]) not in supported:
            raise UserError(
                f"{file}: {key} {document[key]!r} is not supported (only {supported[0]!r})"
            )
    known = {*_SETTINGS, *_SUPPORTED, *_WITHOUT_EFFECT, *_PATTERNS}
    if unsupported := sorted(
        f"{key} ({value!r})" for key, value in document.items() if value and key not in known
    ):
        raise UserError(f"{file}: unsupported options: {summarize_names(unsupported)}")
    for key, (field, default) in _SETTINGS.items():
        saved, configured = document.get(key, default), getattr(config, field)
        if saved != configured:
            flags = {True: field, False: f"no_{field}"}
            flag = flags[saved] if isinstance(saved, bool) else f"{field} {saved}"
            raise UserError(
                f"{file}: {key} is {saved}, but {option}.{field} is {configured}; set "
                f"{option}.{flag}"
            )


def _with_sizes_of_file(
    folder: Path, config: LoRAConfig, document: Mapping[str, object], entries: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Return the entries, of fused layers as their adapters in the file are. Raise `UserError` if
    the file's adapters have other ranks or scales than ours."""
    ranks, alphas = (_read_patterns(folder / CONFIG, document, key) for key in _PATTERNS)
    targets = document.get("target_parameters") or []
    if not isinstance(targets, list):
        raise UserError(f"{folder / CONFIG}: target_parameters {targets!r} is not a list")
    found: dict[str, Entry] = {}
    differing: set[str] = set()
    required: dict[str, Size] = {}
    for name, entry in entries.items():
        weight = f"{entry.module}.weight"
        is_parameter = any(f".{weight}".endswith(f".{target}") for target in targets)
        key = weight if is_parameter else entry.module
        size = Size(int(look_up(ranks, key, config.rank)), look_up(alphas, key, config.alpha))
        if isinstance(entry, FusedEntry) and size.rank == entry.size.rank:
            entry = replace(entry, is_shared=True)
        expected = entry.file_size(config.rslora)
        is_equal = size.rank == expected.rank and math.isclose(
            size.alpha, expected.alpha, rel_tol=1e-6
        )
        if not is_equal:
            differing.add(entry.layer)
        required[entry.layer] = entry.size if is_equal else size
        found[name] = entry
    if differing:
        ranks_of, alphas_of = (
            {layer: size[i] for layer, size in required.items()} for i in range(2)
        )
        advice = [
            *_advice(config, "rank_pattern", find_patterns(ranks_of, config.rank)),
            *_advice(config, "alpha_pattern", find_patterns(alphas_of, config.alpha)),
        ]
        layers = summarize_names(sorted(differing))
        raise UserError(
            f"{folder / CONFIG} gives other ranks or alpha to {layers}; {' and '.join(advice)}"
        )
    return found


def _advice(config: LoRAConfig, field: str, patterns: Mapping[str, float]) -> list[str]:
    """Return the change of options that gives these patterns, if any."""
    option = f"{config.option}.{field}"
    if patterns:
        values = " ".join(f"{name}={_whole_if_possible(value)}" for name, value in patterns.items())
        return [f"set {option} {values}"]
    return [f"remove {option}"] if getattr(config, field) else []


def _read_patterns(file: Path, document: Mapping[str, object], key: str) -> dict[str, float]:
    """Return PEFT's numbers by pattern. Raise `UserError` for a value that PEFT would not
    accept."""
    patterns = document.get(key) or {}
    if not isinstance(patterns, dict):
        raise UserError(f"{file}: {key} {patterns!r} is not an object")
    for pattern, value in patterns.items():
        is_number = isinstance(value, int) or (isinstance(value, float) and key == "alpha_pattern")
        if not is_number or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"{file}: {key} of {pattern!r} is {value!r}, not a number above 0")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{file}: {key} has {pattern!r}, which is no regular expression: {error}"
            ) from None
    return patterns


@torch.no_grad()
def _load_part(source: AdapterSource, name: str, tensor: Tensor) -> None:
    """Copy this process's shard of an adapter tensor, or compare its shard of a base weight."""
    part, values = read_part(source, name, tensor)
    if name not in source.base:
        part.copy_(values)
    elif not torch.allclose(values.float(), part.cpu().float(), rtol=_ROUNDING, atol=1e-6):
        raise UserError(
            f"the adapter was trained with another base model: its {name} differs from this model's"
        )


def _patterns(
    entries: Collection[Entry], config: LoRAConfig, spec: ModelSpec
) -> dict[str, dict[str, float]]:
    """Return PEFT's options for ranks and alphas that differ from the adapter's; none if there are
    no others."""
    sizes = peft_sizes(entries, spec, config.rslora)
    ranks = find_patterns({name: size.rank for name, size in sizes.items()}, config.rank)
    alphas = find_patterns({name: size.alpha for name, size in sizes.items()}, config.alpha)
    if not ranks and not alphas:
        return {}
    whole = {name: _whole_if_possible(alpha) for name, alpha in alphas.items()}
    return {"rank_pattern": dict(ranks), "alpha_pattern": whole}


def _whole_if_possible(number: float) -> float:
    return int(number) if number == int(number) else number


def _check_layers(
    folder: Path,
    option: str,
    saved: Mapping[str, TensorSpec],
    entries: Collection[Entry],
    spec: ModelSpec,
) -> None:
    """Raise `UserError` if the adapter's file has other layers than the run, or missing or
    unexpected tensors, or tensors of the wrong shape or type."""
    expected = {entry.key: entry for entry in entries}
    run_modules = {module_of(entry.key) for entry in entries}
    saved_modules = {module_of(key) for key in saved}
    if run_modules != saved_modules:
        differences = {
            "only in the file": saved_modules - run_modules,
            "only in the run": run_modules - saved_modules,
        }
        internal_names = map_to_internal(spec)
        described = "; ".join(
            f"{place}: {summarize_names(sorted(internal_names.get(name, name) for name in names))}"
            for place, names in differences.items()
            if names
        )
        raise UserError(
            f"{folder}: the adapter has other layers than {option}.include and exclude select: "
            f"{described}"
        )
    faults = [
        f"{key} is missing"
        for key, entry in expected.items()
        if key not in saved and not entry.is_base
    ]
    for key, tensor_spec in saved.items():
        if key not in expected:
            faults.append(f"{key} is unknown")
        elif tensor_spec.shape != expected[key].file_shape:
            faults.append(
                f"{key} has shape {list(tensor_spec.shape)} instead of "
                f"{list(expected[key].file_shape)}"
            )
        elif not (tensor_spec.dtype.is_floating_point and tensor_spec.dtype.itemsize >= 2):
            faults.append(f"{key} has type {str(tensor_spec.dtype).removeprefix('torch.')}")
    if faults:
        raise UserError(f"{folder / WEIGHTS} does not fit the model: {summarize_names(faults)}")
