"""Open a checkpoint in any format, and find its model family."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from torchtitan.components.checkpoint.formats import (
    LIBRARIES,
    format_of,
    formats_in,
    library_of,
)
from torchtitan.components.weights import Format, MetaSource, TensorSource, load_weights, pretrained
from torchtitan.components.weights.assets import DESCRIPTION, asset_folder, read_model_json
from torchtitan.components.weights.dequantize import check_quantization
from torchtitan.components.weights.export import prevailing_dtype
from torchtitan.components.weights.load import check_types
from torchtitan.config.registry import trusted_module
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.families import ANY_CLASS, families_with, named_family
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.tools.errors import UnsupportedModelError, UserError, errors_of
from torchtitan.tools.files import inner_folder, missing_folder_error, read_object
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import allocate

DESCRIPTIONS = {"hf": "config.json", "meta": "params.json"}
"""Format → name of the file next to the weights that describes the model."""

_FOREIGN_FLAVOR = "pretrained"
"""Flavor of a model with the sizes of a checkpoint in another format."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, in this process."""

    model: BaseModel
    """In evaluation mode."""

    spec: ModelSpec

    tokenizer_path: Path
    """Folder with its tokenizer's files."""


def checkpoint_format(path: str | Path, family: ModuleType | None = None) -> Format:
    """Return the format of the checkpoint in the folder `path`. Raise `UserError` if the folder has
    no checkpoint, or config.json describes an unsupported model, even before its weights are
    downloaded. `family`: as in `spec_of`."""
    try:
        return format_of(path)
    except UserError:
        if not formats_in(Path(path)) and (Path(path) / DESCRIPTIONS["hf"]).is_file():
            huggingface_model(Path(path), family)
        raise


def spec_of(path: str | Path, family: ModuleType | None = None) -> ModelSpec:
    """Return the specification of the model in a checkpoint of any format, preferring `family`, a
    package, to built-in and installed families. Raise `UserError` if the folder has no checkpoint,
    or no family supports its model."""
    folder = Path(path)
    found = checkpoint_format(folder, family)
    if found == "hf":
        return huggingface_model(folder, family)[0]
    if found == "meta":
        document = _read_description(folder, "meta")
        # in Llama 1 and 2; Meta's code takes the tokenizer's
        if document.get("vocab_size", -1) == -1:
            document["vocab_size"] = MetaSource(folder).vocab_size
        return _external_spec(next(families_with("meta", family)), "meta", document)
    saved = read_model_json(folder)
    package = named_family(saved["module"], folder, family)
    classes = {type(config)._owner.__name__: type(config) for config in package.FLAVORS.values()}
    if saved["model"] not in classes:
        raise UserError(
            f"{folder / DESCRIPTION}: '{saved['model']}' is not a model of {package.__name__}, "
            f"which has {', '.join(classes)}"
        )
    with errors_of(str(folder / DESCRIPTION)):
        model = classes[saved["model"]].from_dict(saved["config"])
    spec: ModelSpec = package.model_spec(model, saved["flavor"])
    return spec


def internal_source(
    path: str | Path, *, base: Path | None = None, family: ModuleType | None = None
) -> tuple[ModelSpec, TensorSource]:
    """Return the model of a checkpoint in any format (`family`: as in `spec_of`), and its weights
    with our names and layout. If it has only trained weights, `base` is the folder of the others,
    by default the original one. Raise `UserError` like `spec_of`, and if tensors do not fit the
    model, or are missing."""
    spec = spec_of(path, family)
    return spec, pretrained.internal_source(path, spec, base=base)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    base: Path | None = None,
    family: ModuleType | None = None,
) -> LoadedModel:
    """Return the model of a checkpoint in any format, with its weights, read one tensor at a time.
    Raise `UserError` like `internal_source`, whose arguments it takes, and if a DCP checkpoint is
    damaged, or its weights are quantized. `dtype` is the type of the weights; None: the most
    frequent type in the checkpoint."""
    checkpoint_format(path, family)
    pretrained.check_digests(path)
    spec, source = internal_source(path, base=base, family=family)
    with torch.device("meta"):
        model: BaseModel = spec.model.build()
    check_types(source.specs, model.state_dict())
    model = model.to(dtype or prevailing_dtype(source.specs))
    allocate(model, device)
    initialize_weights(model, 0, loaded=source.specs)  # buffers that files do not hold
    load_weights(source, [model])
    return LoadedModel(model.eval(), spec, asset_folder(Path(path)))


def huggingface_model(
    folder: Path, family: ModuleType | None = None
) -> tuple[ModelSpec, dict[str, object]]:
    """Return the specification of the model that the config.json in `folder` describes, and the
    content of that file. If neither a family (see `spec_of`) nor transformers has its `model_type`,
    `architectures` names the class of transformers whose type the content then has. Raise
    `UserError` if there is no such file or class, it does not compute the model, or the weights are
    quantized by an unsupported method."""
    document = _read_description(folder, "hf")
    document["model_type"] = document.pop(LIBRARIES[library_of(document)].class_key, None)
    if document["model_type"] is None:
        raise UserError(f"{folder}: its config.json has no model_type, which names the family")
    if not isinstance(document["model_type"], str):
        reader = ConfigReader(DESCRIPTIONS["hf"], document)
        raise reader.wrong("model_type", document["model_type"], "a name")
    check_quantization(folder)
    if spec := _family_spec(document, family):
        return spec, document
    any_class = trusted_module(ANY_CLASS)
    assert any_class is not None, "built-in modules are trusted"
    if model_type := any_class.type_of_architecture(document):
        logger.warning(
            "config.json: model_type %r is unknown; the class in architectures decides: %s",
            document["model_type"],
            model_type,
        )
        document = {**document, "model_type": model_type}
        if spec := _family_spec(document, family):
            return spec, document
        if unknown := any_class.unknown_keys(document):
            logger.warning("config.json: ignoring unknown keys: %s", ", ".join(unknown))
    # a model may need code in its folder
    located = {**document, "_name_or_path": str(folder.resolve())}
    return _external_spec(any_class, "hf", located), document


def _family_spec(document: Mapping[str, object], family: ModuleType | None) -> ModelSpec | None:
    """Return the model that a config.json describes if a family has its `model_type`."""
    if family is not None and family.__name__ == ANY_CLASS:
        return None
    for package in families_with("hf", family):
        if document["model_type"] in package.FORMATS["hf"].model_types:
            try:
                return _external_spec(package, "hf", document)
            except UnsupportedModelError as error:
                raise UserError(f"{error}; --module transformers may support it") from error
    return None


def _read_description(folder: Path, format: str) -> dict[str, object]:
    name = DESCRIPTIONS[format]
    if not folder.is_dir():
        raise missing_folder_error(folder)
    if not os.path.lexists(folder / name):
        if os.path.lexists(folder / "adapter_config.json"):
            raise UserError(
                f"'{folder}' is an adapter, without its model; use the model's folder, and to "
                f"train the adapter further --model_converters.lora.adapter_path {folder}"
            )
        raise UserError(
            f"'{folder}' has no {name}, which says what model it holds{inner_folder(folder)}"
        )
    return read_object(folder / name)


def _external_spec(family: ModuleType, format: str, document: Mapping[str, object]) -> ModelSpec:
    spec: ModelSpec = family.model_spec(
        family.FORMATS[format].from_external(document), _FOREIGN_FLAVOR
    )
    return spec
