"""Applies the converters of a run to its model."""

from collections.abc import Sequence

import torch
from torch import nn

from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.errors import UserError


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
