"""The trainer of FLUX on images with captions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.images.captioned_loader import CaptionedImageDataLoader
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

from .trainer import FlowMatchingTrainer


class CaptionTrainer(FlowMatchingTrainer):
    """Train a model that reads text on images, or their latents, with captions."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlowMatchingTrainer.Config):
        """A whole run of flow matching on images with captions."""

        dataloader: CaptionedImageDataLoader.Config = field(
            default_factory=CaptionedImageDataLoader.Config
        )
        """Training data."""

        def check_data(self) -> None:
            """Raise `UserError` if the model does not read the states of the encoders, or images of
            the buckets."""
            model: Any = self.model_spec.model
            loader, folder = self.dataloader, self.dataloader.folder
            widths = {"text_dim": folder.text_dim, "pooled_dim": folder.pooled_dim}
            for name, width in {**widths, "channels": loader.shapes[0][0]}.items():
                if (own := getattr(model, name, None)) != width:
                    raise UserError(
                        f"--model.{name} is {own}, and --dataloader.encoders {loader.encoders} "
                        f"gives {width}; set --model.{name} {width}, or use other encoders"
                    )
            for size, shape in zip(loader.sizes, loader.shapes, strict=True):
                if any(side % model.patch_size for side in shape[1:]):
                    least = folder.reduction * model.patch_size
                    raise UserError(
                        f"images of {size[0]}x{size[1]} pixels do not fit the model's patches; use "
                        f"multiples of {least}"
                    )
            self._check_tokens(model.patch_size)
            if len(loader.sizes) == 1 and loader.shapes[0][1] != model.image_size:
                raise UserError(
                    f"--model.image_size {model.image_size} must be {loader.shapes[0][1]}, the "
                    "height of the images or of their latents, so that operations are counted"
                )

        def _check_tokens(self, patch_size: int) -> None:
            """Raise `UserError` if context-parallel ranks cannot divide the tokens of a caption, or
            of an image of a bucket, which may come late in a run."""
            loader, degree = self.dataloader, self.parallelism.context_parallel_degree
            counts = {"a caption (--dataloader.caption_tokens)": loader.caption_tokens}
            for (height, width), shape in zip(loader.sizes, loader.shapes, strict=True):
                n_patches = shape[1] // patch_size * (shape[2] // patch_size)
                counts[f"an image of {height}x{width} pixels"] = n_patches
            for part, n_tokens in counts.items():
                if n_tokens % degree:
                    raise UserError(
                        f"--parallelism.context_parallel_degree {degree} does not divide the "
                        f"{n_tokens} tokens of {part}"
                    )

    config: Config
    dataloader: CaptionedImageDataLoader

    def __init__(self, config: Config):
        super().__init__(config)
        model: Any = config.model_spec.model
        side = model.image_size
        if any(shape[1:] != (side, side) for shape in config.dataloader.shapes):
            logger.info(
                "TFLOP/s and MFU count each image as one of --model.image_size %d, whatever its "
                "size is",
                side,
            )

    @property
    def sampled_shape(self) -> tuple[int, ...]:
        return self.config.dataloader.shapes[0]

    def examples(self, most: int) -> Batch:
        return self.dataloader.examples(most)

    def conditions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the `text` (B, T, text_dim) and `pooled` (B, pooled_dim) of a batch's captions."""
        return {name: batch[name] for name in ("text", "pooled")}

    def to_images(self, x: Tensor) -> Tensor:
        return self.config.dataloader.folder.decode(x)
