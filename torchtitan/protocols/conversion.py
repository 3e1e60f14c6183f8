"""Applies the converters of a run to its model; says which they were, and has them back from that."""

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.config.configurable import Configurable
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

Description = Mapping[str, Any]
"""A converter as JSON: `class` (import path of its module, a colon, its name there) and `config`."""


def convert_model(
    model: nn.Module, converters: Sequence[ModelConverter], *, frozen_dtype: torch.dtype | None = None
) -> None:
    """Apply `converters` in order to a model on the meta device, in place.

    Args:
        model: the plain model.
        converters: what `Trainer.Config.model_converters` built.
        frozen_dtype: of floating-point weights that are not trained where a converter `freezes`: the type that they are
            computed in. None: they stay as they are.

    Raises:
        UserError: where a converter does not find what it is to convert, or nothing is left to train.
    """
    for converter in converters:
        converter.convert(model)
    if converters and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model_converters leave nothing to train: all parameters are frozen")
    if frozen_dtype is not None and any(converter.freezes for converter in converters):
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(frozen_dtype)


def converted_model(config: BaseModel.Config, converters: Sequence[ModelConverter]) -> BaseModel:
    """A model on the meta device with the tensors that `converters` make of its own: those of them have been applied
    that change weights, without saying so once more.

    Raises:
        UserError: as `convert_model`.
    """
    with torch.device("meta"):
        model: BaseModel = config.build()
    with _only_warnings():
        convert_model(model, [converter for converter in converters if converter.changes_weights])
    return model


def describe_converters(configs: Iterable[Configurable.Config]) -> list[dict[str, Any]]:
    """Those of a run's converters that one has to know to make a plain model of its weights, in order; see
    `Description`."""
    owners = [(config._owner, config) for config in configs]
    return [
        {"class": f"{owner.__module__}:{owner.__qualname__}", "config": config.to_dict()}
        for owner, config in owners
        if issubclass(owner, ModelConverter) and owner.changes_weights
    ]


def described_converters(descriptions: Iterable[Description], said_by: str) -> list[ModelConverter]:
    """The converters that `describe_converters` was given.

    Args:
        descriptions: what it returned.
        said_by: what holds them, for the messages.

    Raises:
        UserError: for one that cannot be imported, or is no converter any more, by name.
    """
    return [_described(description, said_by) for description in descriptions]


def _described(description: Description, said_by: str) -> ModelConverter:
    path = str(description.get("class"))
    module, _, name = path.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for part in name.split("."):
            owner = getattr(owner, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{said_by} was saved with the converter {path}, which cannot be imported: {error}; "
            "put what it is in where Python finds it (PYTHONPATH)"
        ) from error
    if not (isinstance(owner, type) and issubclass(owner, ModelConverter)):
        raise UserError(f"{said_by} was saved with the converter {path}, which is not a ModelConverter")
    converter: ModelConverter = owner.Config.from_dict(description.get("config", {})).build()
    return converter


@contextlib.contextmanager
def _only_warnings() -> Iterator[None]:
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
