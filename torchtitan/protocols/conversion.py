"""Apply a run's converters to its model, describe them for a checkpoint, and restore them from it."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.config.configurable import Configurable, config_key
from torchtitan.config.registry import trusted_module
from torchtitan.protocols.converter import ModelConverter, only_warnings
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError

ConverterRecord = Mapping[str, Any]
"""A converter as JSON: `class` (import path of its module, a colon, its name there) and `config`."""


def convert_model(
    model: nn.Module, converters: Sequence[ModelConverter], *, frozen_dtype: torch.dtype | None = None
) -> None:
    """Apply `converters` in order to a model on the meta device, in place.

    Args:
        frozen_dtype: type of the frozen weights of linear layers if a converter `freezes`; None: unchanged. Other
            modules keep their types: an embedding's, for example, is also the hidden states'.

    Raises:
        UserError: if a converter finds nothing to convert, or nothing is left to train.
    """
    for converter in converters:
        converter.convert(model)
    if converters and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model_converters leave nothing to train: all parameters are frozen")
    if frozen_dtype is not None and any(converter.freezes for converter in converters):
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                _cast_frozen(layer, frozen_dtype)


def _cast_frozen(layer: nn.Linear, dtype: torch.dtype) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        if name in ("weight", "bias") and not parameter.requires_grad:  # not a converted layer's own additions
            # Replaced: through `.data`, a wrapper tensor, such as weights gathered in float8, would keep its type.
            layer.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))


def converted_model(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> BaseModel:
    """Return a model on the meta device, silently converted by all `converters` that change weights."""
    return _converted(config, [converter for converter in converters if converter.changes_weights])


def _converted(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> BaseModel:
    with torch.device("meta"):
        model: BaseModel = config.build()
    with only_warnings():
        convert_model(model, converters)
    return model


def check_plain_state(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> None:
    """Raise `UserError`, naming the tensors, if a converter changes the model's tensors without declaring it."""
    models = (_converted(config, converters), converted_model(config, converters))
    ours, known = (tensor_shapes(model).items() for model in models)
    if unknown := sorted({name for name, _ in ours ^ known}):
        raise UserError(
            f"the model_converters change the model's tensors ({', '.join(unknown[:5])}), and the one that does has no "
            "changes_weights = True, so that the plain model could not be made of the weights"
        )


def tensor_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return name → shape of a model's tensors in checkpoints."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def converter_records(configs: Iterable[Configurable.Config]) -> list[ConverterRecord]:
    """Describe, in order, the converters needed to make a plain model of a run's weights."""
    return [_converter_record(config) for config in configs if _class_of(config).changes_weights]


def simulation_records(configs: Iterable[Configurable.Config]) -> list[ConverterRecord]:
    """Describe, in order, the converters needed to compute as the run does."""
    return [_converter_record(config) for config in configs if _class_of(config).simulates]


def _class_of(config: Configurable.Config) -> type[ModelConverter]:
    owner = config._owner
    assert issubclass(owner, ModelConverter)
    return owner


def _converter_record(config: Configurable.Config) -> ConverterRecord:
    return {"class": import_path(config._owner), "config": config.to_dict()}


def saved_config(saved: Iterable[ConverterRecord], converter: ModelConverter) -> Configurable.Config | None:
    """Return the configuration in `saved` for this converter's class, or None. Raise `UserError` for unknown fields."""
    configs = [said.get("config", {}) for said in saved if said.get("class") == import_path(type(converter))]
    return type(converter).Config.from_dict(configs[0]) if configs else None


def differences(saved: Sequence[ConverterRecord], converters: Iterable[ModelConverter]) -> list[str]:
    """Explain differences in meaning between `saved` weights and the run's `converters`, by options alone. Raise
    `UserError` like `saved_config`."""
    ours = {import_path(type(converter)): converter for converter in converters if converter.changes_weights}
    theirs = {str(said.get("class")) for said in saved}
    found = [f"the run lacks {path}" for path in sorted(theirs - ours.keys())]
    found += [f"the run has {path} besides" for path in sorted(ours.keys() - theirs)]
    for converter in ours.values():
        if (config := saved_config(saved, converter)) is None:
            continue
        then, now = meaning_of(config), meaning_of(converter.config)
        found += [
            f"--model_converters.{config_key(config)}.{name} was {then[name]} and is {now[name]}"
            for name in now
            if then[name] != now[name]
        ]
    return found


def meaning_of(config: Configurable.Config) -> dict[str, Any]:
    """Return the options of a converter that decide what its weights mean: all except its `run_options`."""
    run_options = _class_of(config).run_options
    return {name: value for name, value in config.to_dict().items() if name not in run_options}


def converters_from_records(records: Iterable[ConverterRecord], said_by: str) -> list[ModelConverter]:
    """Restore converters from the result of `converter_records`, held by `said_by`. Raise `UserError`, naming a class
    that must not be imported (`config.registry.trusted_module`), cannot be, or is no longer a converter."""
    return [_converter_from_record(record, said_by) for record in records]


def import_path(owner: type) -> str:
    """Return `module:qualified name` of a class."""
    return f"{owner.__module__}:{owner.__qualname__}"


def _converter_from_record(record: ConverterRecord, said_by: str) -> ModelConverter:
    path = str(record.get("class"))
    said = f"{said_by} was saved with the converter {path}"
    module, _, name = path.partition(":")
    try:
        owner: Any = trusted_module(module)
    except UserError as error:
        raise UserError(f"{said}: {error}") from error
    if owner is None:
        raise UserError(
            f"{said}, which is not built in; if you trust it, name the module whose config_registry.py imports it: "
            "--module PATH"
        )
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part, None)  # runs no code of the module
    is_converter = isinstance(owner, type) and issubclass(owner, ModelConverter)
    if not (is_converter and (owner.changes_weights or owner.simulates)):
        raise UserError(f"{said}, which is not a ModelConverter that checkpoints name")
    converter: ModelConverter = owner.Config.from_dict(record.get("config", {})).build()
    return converter
