"""Apply converters to a model, record them in a checkpoint, and restore them from it."""

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchtitan.config.configurable import Configurable, config_key
from torchtitan.config.registry import trusted_module
from torchtitan.protocols.converter import ModelConverter
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError, errors_of
from torchtitan.tools.logging import without_logs

ConverterRecord = Mapping[str, Any]
"""A converter as JSON: `class` (import path of its module, a colon, its name there) and
`config`."""


def convert_model(
    model: nn.Module,
    converters: Sequence[ModelConverter],
    *,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Apply `converters` in order to a model on the meta device, in place. Raise `UserError` if a
    converter finds nothing to convert, or all parameters are frozen.

    Args:
        frozen_dtype: type of the frozen weights of linear layers and experts if a converter
            `freezes`; None: unchanged. Others keep their types, since an embedding, for example,
            determines the type of the hidden states.
    """
    for converter in converters:
        converter.convert(model)
    if converters and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "the model_converters leave nothing to train, since they freeze all parameters"
        )
    if frozen_dtype is not None and any(converter.freezes for converter in converters):
        layers: list[tuple[nn.Module, Collection[str]]] = [
            (layer, ("weight", "bias")) for layer in model.modules() if isinstance(layer, nn.Linear)
        ]
        for layer, names in layers + (
            model.expert_matrices() if isinstance(model, BaseModel) else []
        ):
            _cast_frozen(layer, names, frozen_dtype)


def _cast_frozen(layer: nn.Module, names: Collection[str], dtype: torch.dtype) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        # Excludes parameters added by a converter.
        if name in names and not parameter.requires_grad:
            # Assigning to `.data` would not change the dtype of a wrapper tensor, such as weights
            # gathered in float8.
            layer.register_parameter(
                name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            )


def converted_model(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> BaseModel:
    """Return a model on the meta device, converted by all `converters` that change weights."""
    return _build_converted(
        config, [converter for converter in converters if converter.changes_weights]
    )


def _build_converted(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> BaseModel:
    with torch.device("meta"):
        model: BaseModel = config.build()
    with without_logs(logging.INFO):
        convert_model(model, converters)
    return model


def check_plain_state(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> None:
    """Raise `UserError`, naming the tensors, if a converter changes the model's tensors without
    declaring it."""
    if all(converter.changes_weights for converter in converters):
        return
    models = (_build_converted(config, converters), converted_model(config, converters))
    actual, declared = (tensor_shapes(model).items() for model in models)
    if undeclared := sorted({name for name, _ in actual ^ declared}):
        raise UserError(
            f"a model converter changes the model's tensors ({', '.join(undeclared[:5])}), so the "
            "plain model cannot be restored; set changes_weights = True in its class"
        )


def tensor_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return name → shape of a model's tensors in checkpoints."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def converter_records(
    configs: Iterable[Configurable.Config],
    kind: Literal["changes_weights", "simulates"] = "changes_weights",
) -> list[ConverterRecord]:
    """Describe, in order, the converters that are needed to restore the plain model's weights from
    a run's, or those that simulate quantization."""
    chosen = [config for config in configs if getattr(config._owner, kind)]
    return [{"class": import_path(config._owner), "config": config.to_dict()} for config in chosen]


def saved_config(
    saved: Iterable[ConverterRecord], converter: ModelConverter
) -> Configurable.Config | None:
    """Return the configuration in `saved` for this converter's class, or None. Raise `UserError`
    for unknown fields."""
    configs = [
        record.get("config", {})
        for record in saved
        if record.get("class") == import_path(type(converter))
    ]
    return type(converter).Config.from_dict(configs[0]) if configs else None


def differences(
    saved: Sequence[ConverterRecord], converters: Iterable[ModelConverter]
) -> list[str]:
    """Describe the differences between the converters of `saved` weights and the run's
    `converters`, from their options alone. Raise `UserError` like `saved_config`."""
    configured = {
        import_path(type(converter)): converter
        for converter in converters
        if converter.changes_weights
    }
    saved_paths = {str(record.get("class")) for record in saved}
    described = [f"the run does not use {path}" for path in sorted(saved_paths - configured.keys())]
    described += [f"the run adds {path}" for path in sorted(configured.keys() - saved_paths)]
    for converter in configured.values():
        if (config := saved_config(saved, converter)) is None:
            continue
        before, now = weight_options(config), weight_options(converter.config)
        described += [
            f"--model_converters.{config_key(config)}.{name} was {before[name]} and is {now[name]}"
            for name in now
            if before[name] != now[name]
        ]
    return described


def weight_options(config: Configurable.Config) -> dict[str, Any]:
    """Return the options of a converter that determine the meaning of its weights: all except its
    `run_options`."""
    assert issubclass(config._owner, ModelConverter)
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in config._owner.run_options
    }


def converters_from_records(
    records: Iterable[ConverterRecord], origin: str
) -> list[ModelConverter]:
    """Restore converters from the result of `converter_records`, read from `origin`. Raise
    `UserError` if a class must not be imported (`config.registry.trusted_module`), cannot be
    imported, or is not a converter."""
    return [_converter_from_record(record, origin) for record in records]


def import_path(owner: type) -> str:
    """Return `module:qualified name` of a class."""
    return f"{owner.__module__}:{owner.__qualname__}"


def _converter_from_record(record: ConverterRecord, origin: str) -> ModelConverter:
    path = str(record.get("class"))
    prefix = f"{origin} was saved with the converter {path}"
    module, _, name = path.partition(":")
    with errors_of(prefix):
        owner = trusted_module(module)
    if owner is None:
        raise UserError(
            f"{prefix}, which is not built in; if you trust it, set --module to the module whose "
            "config_registry.py imports it"
        )
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part, None)  # does not run the module's code
    is_converter = isinstance(owner, type) and issubclass(owner, ModelConverter)
    if not (is_converter and (owner.changes_weights or owner.simulates)):
        raise UserError(
            f"{prefix}, which is not a ModelConverter that changes or simulates weights"
        )
    converter: ModelConverter = owner.Config.from_dict(record.get("config", {})).build()
    return converter
