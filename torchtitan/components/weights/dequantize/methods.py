"""Methods of quantization, by the name in a folder's files, and the tensors that they leave."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.weights.dequantize.bitsandbytes import bitsandbytes_weights
from torchtitan.components.weights.dequantize.integers import (
    awq_weights,
    compressed_integer,
    gptq_weights,
)
from torchtitan.components.weights.dequantize.nvfp4 import fp4_weight
from torchtitan.components.weights.dequantize.scaled import scaled_weights
from torchtitan.components.weights.dequantize.weight import QuantizedWeight
from torchtitan.components.weights.few_bits import FewBits
from torchtitan.protocols.tensor_source import (
    Slices,
    TensorSource,
    full_slices,
    slice_shape,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object

Section = Mapping[str, object]
"""Description of a quantization, `quantization_config` of config.json."""

_OTHER_SCALES = (
    "activation_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".input_zero_point",
    ".qscale_act",
    ".k_scale",
    ".v_scale",
)
"""Name endings of unused scales, which are not for weights."""

_COMPUTED_ELEMENTS = 2**24

DESCRIPTIONS = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
}
"""Files that describe the quantization of folders whose config.json does not: the method, and the
key of the description."""

_FORMATS = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
"""Formats of compressed-tensors with fewer bits."""

_MLX = "mlx"
"""Method of folders with the key `quantization`, which mlx-lm writes, alone or with the same
`quantization_config`."""

_ALGORITHMS = ("FP8", "MIXED_PRECISION", "NVFP4", "None", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
"""Algorithms of ModelOpt; None: of keys and values alone."""

Finder = Callable[[TensorSource, Section], Mapping[str, QuantizedWeight]]
"""Returns the quantized weights of a folder, by name. The description has the type of the model as
`dtype`, if config.json names one."""


def check_quantization(folder: Path) -> None:
    """Raise `UserError` if the files in `folder` name an unsupported method of quantization."""
    method, section = read_method(folder)
    if section.get("transform_config") and not _is_rotated_offline(section["transform_config"]):
        raise UserError(
            "config.json: quantization_config has a transform_config that also rotates "
            "activations, so the stored weights are rotated, and cannot be loaded; use the model "
            "before quantization"
        )
    sparsity = section.get("sparsity_config")
    pruned = sparsity.get("format") if isinstance(sparsity, dict) else None
    if pruned not in (None, "dense"):
        raise UserError(
            f"config.json: quantization_config has a sparsity_config of the format '{pruned}', "
            "which stores only the weights that are not zero, and cannot be loaded; use the model "
            "before compression"
        )
    if not method or method in _METHODS:
        return
    if method == _MLX:
        raise UserError(
            "config.json: the key quantization says that mlx-lm wrote the weights, in few bits of "
            "MLX's own form, which cannot be loaded; use the model before quantization"
        )
    if method == "unknown":
        keys = ", ".join(map(str, section)) or "nothing"
        raise UserError(
            f"config.json: quantization_config has no quant_method, but {keys}; add the method "
            "that wrote the weights, or use the model before quantization"
        )
    name = method.partition(" (")[0]
    variants = [each for each in _METHODS if each.startswith(f"{name} (")]
    known = variants or list(dict.fromkeys(each.partition(" (")[0] for each in _METHODS))
    raise UserError(
        f"{_place_of_section(folder)} has '{method}', and only weights of {', '.join(known)} can "
        "be loaded; use the model before quantization"
    )


def _is_rotated_offline(config: object) -> bool:
    """Return whether a transform_config rotates weights alone. Those are stored rotated, and one
    rotation undoes the other, so that the model computes the same without any."""
    schemes = config.get("config_groups") if isinstance(config, dict) else None
    applied: list[object] = []
    for scheme in schemes.values() if isinstance(schemes, dict) else ():
        parts = scheme.get("apply") if isinstance(scheme, dict) else None
        applied += parts if isinstance(parts, list) and not scheme.get("requires_grad") else [None]
    locations = [part.get("location") if isinstance(part, dict) else None for part in applied]
    return bool(locations) and set(locations) <= {"weight_input", "weight_output"}


def dequantized(source: TensorSource, folder: Path) -> TensorSource:
    """Return the tensors of the Hugging Face checkpoint in `folder`: a `DequantizedSource` if its
    files name a supported method and it has quantized weights or unused scales, otherwise `source`.
    Raise `UserError` if the description is invalid, and as that class."""
    method, section = read_method(folder)
    if method not in _METHODS:
        return source
    check_quantization(folder)
    weights = _METHODS[method](source, {"dtype": _dtype(folder), **section})
    has_scales = any(name.endswith(_OTHER_SCALES) for name in source.specs)
    return DequantizedSource(source, weights, method) if weights or has_scales else source


def read_method(folder: Path) -> tuple[str, Section]:
    """Return the method of quantization ("" for none; with the format or algorithm, if it has
    several) and its configuration."""
    section = _section(folder)
    if not isinstance(section, dict):
        return str(section or ""), {}
    if isinstance(read_object(folder / "config.json").get("quantization"), dict):
        return _MLX, section
    default = "modelopt" if "quant_algo" in section else "unknown"
    method = str(section.get("quant_method", default))
    if method == "compressed-tensors":
        return f"{method} ({section.get('format')})", section
    if method == "modelopt":
        return f"{method} ({section.get('quant_algo')})", section
    return method, section


def _section(folder: Path) -> object:
    """Return the description of the quantization, or None."""
    document = read_object(folder / "config.json")
    text = document.get("text_config")
    nested = text if isinstance(text, dict) else {}
    # ModelOpt's export of a quantized model describes itself in a file, and leaves the section of
    # the language model as it was (NVIDIA's NVFP4 of Kimi K2.5).
    return (
        document.get("quantization_config")
        or document.get("quantization")
        or _described_beside(folder)
        or nested.get("quantization_config")
    )


def _place_of_section(folder: Path) -> str:
    """Return where the quantization is described, for a message."""
    document = read_object(folder / "config.json")
    beside = [name for name in DESCRIPTIONS if (folder / name).is_file()]
    if beside and not document.get("quantization_config"):
        return str(folder / beside[0])
    return "config.json: quantization_config"


def _dtype(folder: Path) -> object:
    document = read_object(folder / "config.json")
    text = document.get("text_config")
    parts = [document, text] if isinstance(text, dict) else [document]
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next(filter(None, found), None)


def _described_beside(folder: Path) -> Section | None:
    """Return the description in a file of its own, which older libraries write."""
    for name, (method, key) in DESCRIPTIONS.items():
        if (folder / name).is_file():
            described = read_object(folder / name)
            section = described.get(key) if key else described
            if not isinstance(section, dict):
                raise UserError(f"{folder / name} describes no quantization: it has no {key!r}")
            return {"quant_method": method, **section}
    return None


class DequantizedSource(TensorSource):
    """Tensors of `source` with weights instead of the tensors that describe them. Only the
    requested items of the first dimension are read, in chunks.

    Args:
        source: tensors of a Hugging Face checkpoint.
        weights: quantized weights by name.
        method: name of the method of quantization.
    """

    def __init__(
        self, source: TensorSource, weights: Mapping[str, QuantizedWeight], method: str = ""
    ):
        self.method = method
        self._source = source
        self._weights = weights
        used = {name for weight in weights.values() for name in weight.stored}
        others = (
            name for name in source.specs if name not in used and not name.endswith(_OTHER_SCALES)
        )
        self.specs = {
            **{name: source.specs[name] for name in others},
            **{name: weight.spec for name, weight in weights.items()},
        }
        self._part = ""
        kept = {name: weight.kept for name, weight in weights.items()}
        self.forms = {name: form.text for name, form in kept.items() if isinstance(form, FewBits)}
        self.reasons = {name: reason for name, reason in kept.items() if isinstance(reason, str)}

    def of_part(self, part: str) -> TensorSource:
        source = copy.copy(self)
        source._part = part
        return source

    @property
    def types(self) -> list[torch.dtype]:
        """Types of the weights after reading."""
        return sorted({weight.spec.dtype for weight in self._weights.values()}, key=str)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name not in self._weights:
            return self._source.read(name, slices)
        weight = self._weights[name]
        first, *others = part = slices or full_slices(weight.spec.shape)
        result = torch.empty(0)
        n_items = max(1, _COMPUTED_ELEMENTS // max(1, weight.spec.shape[1:].numel()))
        for start in range(first.start, first.stop, n_items):
            items = slice(start, min(start + n_items, first.stop))
            if self._part:
                values = weight.part(self._source, items, self._part)
            else:
                values = weight.read(self._source, items)
            if start == first.start:
                result = torch.empty(slice_shape(part), dtype=values.dtype)
            result[start - first.start :][: len(values)] = values[(slice(None), *others)]
        return result


def _in_blocks(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    return scaled_weights(
        source.specs, _block(section.get("weight_block_size", [128, 128]), "weight_block_size")
    )


def _without_blocks(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    return scaled_weights(source.specs)


def _gptq(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    return gptq_weights(source, section)


def _awq(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    return awq_weights(source.specs, section)


def _bitsandbytes(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    types = {"float16": torch.float16, "float32": torch.float32}
    name = str(section.get("dtype")).removeprefix("torch.")
    return bitsandbytes_weights(source, types.get(name, torch.bfloat16))


def _modelopt(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    """Each layer's tensors tell its method."""
    specs = source.specs
    in_fp4 = [
        name
        for name, spec in specs.items()
        if name.endswith(".weight") and spec.dtype == torch.uint8
    ]
    return {**scaled_weights(specs), **{name: fp4_weight(specs, name) for name in in_fp4}}


def _compressed_tensors(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    """Each layer's tensors tell its method."""
    groups = section.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    parts = [group.get("weights") for group in groups if isinstance(group, dict)]
    schemes = [part for part in parts if isinstance(part, dict)]
    blocks = [scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")]
    groups_in_fp8 = [
        scheme["group_size"]
        for scheme in schemes
        if scheme.get("strategy") == "group"
        and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    ]
    block = _block(blocks[0], "block_structure") if blocks else (1, 1)
    if groups_in_fp8:
        block = _block([1, groups_in_fp8[0]], "group_size")
    weights = dict(scaled_weights(source.specs, block))
    integers = [scheme for scheme in schemes if scheme.get("type", "int") == "int"]
    for name, spec in source.specs.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed" and spec.dtype == torch.uint8:
            weights[f"{layer}.weight"] = fp4_weight(source.specs, name)
        elif kind == "weight_packed" or kind == "weight" and spec.dtype == torch.int8:
            weights[f"{layer}.weight"] = compressed_integer(source, layer, integers)
    return weights


def _dense(source: TensorSource, section: Section) -> Mapping[str, QuantizedWeight]:
    """Weights are stored as they are, such as those of a pruned model. With scales, the library
    rounds them in each forward pass."""
    scale = next((name for name in source.specs if name.endswith(".weight_scale")), None)
    if scale is not None:
        raise UserError(
            f"config.json: quantization_config has the format dense, but the weights have scales "
            f"({scale}), by which compressed-tensors rounds them in each forward pass; use the "
            "model before quantization"
        )
    return {}


def _block(value: Any, key: str) -> tuple[int, int]:
    """Return rows and columns that share a scale; (1, 1) for None."""
    if value is None:
        return (1, 1)
    is_pair = isinstance(value, list) and [type(n) for n in value] == [int, int]
    if not is_pair or min(value) <= 0:
        raise UserError(f"config.json: {key} is {value!r}, but must be two whole numbers above 0")
    rows, columns = value
    return rows, columns


_METHODS: Mapping[str, Finder] = {
    "fp8": _in_blocks,
    "fbgemm_fp8": _without_blocks,
    "mxfp4": _without_blocks,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors (dense)": _dense,
    **{f"compressed-tensors ({name})": _compressed_tensors for name in _FORMATS},
    **{f"modelopt ({name})": _modelopt for name in _ALGORITHMS},
}
