"""Opens a checkpoint in any format, and finds the family of models that it is of."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.config.registry import built_in_modules
from torchtitan.protocols import BaseModel, ForeignFormat, ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.json_file import read_object

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.formats import TensorSource

DESCRIPTIONS = {"hf": "config.json", "meta": "params.json"}
"""Format → name of the file that describes the model, beside the weights."""

_FOREIGN_FLAVOR = "pretrained"
"""The flavor of a model whose sizes are those of a checkpoint in another format."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, in this process."""

    model: BaseModel
    """In evaluation mode."""

    spec: ModelSpec
    """What it was built from."""

    tokenizer_path: Path
    """Folder with its tokenizer's files."""


def spec_of(path: str | Path) -> ModelSpec:
    """The specification of the model whose checkpoint, in any format, lies in the folder `path`.

    Raises:
        UserError: where there is no checkpoint, or no family of models computes what it describes.
    """
    from torchtitan.components.checkpoint.formats import MetaSource, format_of

    folder = Path(path)
    found = format_of(folder)
    if found == "dcp":
        return _native_spec(folder)
    document = read_description(folder, DESCRIPTIONS[found])
    if found == "meta" and document.get("vocab_size", -1) == -1:  # Llama 1 and 2: Meta's code asks the tokenizer
        document["vocab_size"] = MetaSource(folder).vocab_size
    if quantized := document.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{folder}: quantization_config is that of {method!r}, and quantized weights are for what reads that; "
            "name the model that they were made of"
        )
    family, format = _family_of_model_type(document, folder) if found == "hf" else _family_with_meta()
    spec: ModelSpec = family.model_spec(format.from_foreign(document), _FOREIGN_FLAVOR)
    return spec


def native_source(path: str | Path, *, base: Path | None = None) -> "tuple[ModelSpec, TensorSource]":
    """The model of a checkpoint in any format, and its weights under our names and in our layout.

    Args:
        path: the checkpoint's folder.
        base: for one of trained weights only, the folder of the others, where they have moved.

    Raises:
        UserError: as `spec_of`; and where the tensors are not those of the model, or are not all to be had.
    """
    from torchtitan.components.checkpoint import pretrained

    spec = spec_of(path)
    return spec, pretrained.native_source(path, spec, base=base)


def load_model(
    path: str | Path, *, device: torch.device | str, dtype: torch.dtype | None = None, base: Path | None = None
) -> LoadedModel:
    """The model of a checkpoint in any format, with its weights, read one tensor at a time.

    Args:
        path: the checkpoint's folder.
        device: where the model is.
        dtype: of its weights. None: the type in which the checkpoint has most of them.
        base: as of `native_source`.

    Raises:
        UserError: as `native_source`; where a checkpoint of ours is damaged, or its weights are quantized.
    """
    from torchtitan.components.checkpoint.assets import asset_folder
    from torchtitan.components.checkpoint.formats import load_weights
    from torchtitan.components.checkpoint.formats.export import prevailing_dtype
    from torchtitan.components.checkpoint.formats.load import check_types
    from torchtitan.components.checkpoint.pretrained import check_digests

    check_digests(path)
    spec, source = native_source(path, base=base)
    with torch.device("meta"):
        model: BaseModel = spec.model.build()
    check_types(source.forms, model.state_dict())
    model = model.to(dtype or prevailing_dtype(source.forms)).to_empty(device=device)
    load_weights(source, [model])
    return LoadedModel(model.eval(), spec, asset_folder(Path(path)))


def read_description(folder: Path, name: str) -> dict[str, Any]:
    """The content of the file that describes a model: config.json or params.json in `folder`.

    Raises:
        UserError: where there is no such folder or file, or it is not a JSON object.
    """
    file = folder / name
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}'")
    if not file.is_file():
        raise UserError(f"'{folder}' has no {name}, which says what model it holds")
    return read_object(file)


def _native_spec(folder: Path) -> ModelSpec:
    """What a checkpoint of ours says of its model, which may be of a family outside this package."""
    from torchtitan.components.checkpoint.assets import read_model_json

    document = read_model_json(folder)
    name = document["module"]
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{folder} is of a model of the package '{name}', which is no name of a package")
    try:
        family = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{folder} is of a model of the package '{name}', which cannot be imported: {error}") from error
    flavors = getattr(family, "FLAVORS", None)
    if not (flavors and isinstance(flavors, dict) and hasattr(family, "model_spec")):
        raise UserError(f"{folder} is of a model of the package '{name}', which is no family of models")
    config_class = type(next(iter(flavors.values())))
    spec: ModelSpec = family.model_spec(config_class.from_dict(document["config"]), document["flavor"])
    return spec


def _families(format: str) -> list[ModuleType]:
    """The packages of this package's families that have a format."""
    names = [name for name, folder in built_in_modules().items() if folder.parent.name == "models"]
    packages = [importlib.import_module(f"torchtitan.models.{name}") for name in names]
    return [package for package in packages if format in package.FORMATS]


def _family_of_model_type(document: dict[str, Any], folder: Path) -> tuple[ModuleType, ForeignFormat]:
    model_type = document.get("model_type")
    known: list[str] = []
    for family in _families("hf"):
        format: ForeignFormat = family.FORMATS["hf"]
        if model_type in format.model_types:
            return family, format
        known += format.model_types
    raise UserError(f"{folder}: model_type {model_type!r} of its config.json is none of {', '.join(sorted(known))}")


def _family_with_meta() -> tuple[ModuleType, ForeignFormat]:
    (family,) = _families("meta")  # its description does not say which: there can be one only
    return family, family.FORMATS["meta"]
