"""`ImageInputs`: the images of a batch, as a model gets them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

TOKEN_TYPES = "token_type_ids"
"""Last part of the names of a class's arguments for the types of tokens."""

PLACES = "position_mask"
"""Last part of the names of a class's arguments for the places of images among tokens."""

OF_TOKENS = (TOKEN_TYPES, PLACES, "image_attention_mask")
"""Last parts of the names of a class's arguments with a value for each token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """Images of a batch of B rows of L tokens, in the order of their tokens."""

    tensors: Mapping[str, Tensor]
    """Arguments of the class for the images, such as `pixel_values`; empty without images."""

    blank: Mapping[str, Tensor] = field(default_factory=dict)
    """Such arguments for a blank image, for ranks without images, which run the vision tower with
    the others. Empty: on one rank."""

    n_images: int = 0
    """Number of images, for metrics."""

    token_types_BL: Tensor
    """1 for the tokens of images, 0 for text, int64."""

    more_types: Mapping[str, Tensor] = field(default_factory=dict)
    """Other arguments of the class for types of tokens by name, as `token_types_BL`."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of images."""
        return int((self.token_types_BL == 1).sum())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return the images on a device."""

        def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: tensor.to(device, non_blocking=non_blocking)
                for name, tensor in tensors.items()
            }

        return replace(
            self,
            tensors=move(self.tensors),
            blank=move(self.blank),
            more_types=move(self.more_types),
            token_types_BL=self.token_types_BL.to(device, non_blocking=non_blocking),
        )
