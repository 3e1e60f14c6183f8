"""The trainer of FLUX on classes; a fixed text represents each class."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .trainer import FlowMatchingTrainer

N_TOKENS = 4
"""Tokens of the text of a class."""


class ClassTextTrainer(FlowMatchingTrainer):
    """Train a model that reads text on classes: the states and the pooled text of each class are
    fixed random numbers. For captions, override `conditions`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlowMatchingTrainer.Config):
        """A whole run of flow matching on classes, by a model that reads text."""

    def conditions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the `text` (B, 4, text_dim) and `pooled` (B, pooled_dim) of a batch's classes."""
        model: Any = self.config.model_spec.model
        classes_B = batch["classes"]
        tables = class_texts(model.n_classes, model.text_dim, model.pooled_dim, classes_B.device)
        return {name: table[classes_B] for name, table in tables.items()}


@functools.cache
def class_texts(
    n_classes: int, text_dim: int, pooled_dim: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the `text` (classes, 4, text_dim) and `pooled` (classes, pooled_dim) of all
    classes."""
    random = np.random.Generator(np.random.Philox(key=0))
    shapes = {"text": (N_TOKENS, text_dim), "pooled": (pooled_dim,)}
    return {
        name: torch.from_numpy(random.standard_normal((n_classes, *shape), np.float32)).to(device)
        for name, shape in shapes.items()
    }
