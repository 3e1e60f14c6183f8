"""The trainer of models that generate images by flow matching."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.diffusion.flow import N_BUCKETS, FlowMatchingLoss, buckets
from torchtitan.components.generation.forward import evaluating
from torchtitan.components.images.labeled_loader import LabeledImageDataLoader
from torchtitan.components.images.placed_loader import PlacedLoader
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.components.tokenizer.no_tokens import NoTokens
from torchtitan.config import TrainingConfig
from torchtitan.tools.errors import UserError, require
from torchtitan.trainer import Trainer


class FlowMatchingTrainer(Trainer):
    """Train a model to predict velocities from data to noise.

    The model is called as `model(x, times, **conditions)`, and its class has
    `without_conditions(conditions, dropped)`; its configuration has `image_shape` and
    `n_classes`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of flow matching."""

        tokenizer: Tokenizer.Config = field(default_factory=NoTokens.Config)
        """None: the model reads no text."""

        dataloader: PlacedLoader.Config = field(default_factory=LabeledImageDataLoader.Config)
        """Training data."""

        training: TrainingConfig = field(default_factory=lambda: TrainingConfig(seq_len=1))
        """Length, batch sizes and precision of training."""

        def validate(self) -> None:
            seq_len = self.training.seq_len
            require(seq_len == 1, "--training.seq_len", seq_len, "1, as images are not sequences")
            require(
                not self.parallelism.disable_loss_parallel,
                "--parallelism.disable_loss_parallel",
                True,
                "False, since this loss is never divided among ranks",
            )
            self.check_data()

        def check_data(self) -> None:
            """Raise `UserError` if the model does not read the data."""
            model: Any = self.model_spec.model
            loader: Any = self.dataloader
            wanted, given = model.image_shape, loader.format.shape
            if wanted != given:
                raise UserError(
                    f"the model generates images of the shape {list(wanted)} (channels, height, "
                    f"width), and the data has {list(given)}; set --model.image_size and "
                    "--model.channels to the values of --dataloader.image_size and "
                    "--dataloader.channels"
                )

    unit = "images"
    measures_named = tuple(f"loss/times_{k}_of_{N_BUCKETS}" for k in range(1, N_BUCKETS + 1))

    loss: FlowMatchingLoss
    dataloader: PlacedLoader

    @property
    def sampled_shape(self) -> tuple[int, ...]:
        """Shape (channels, height, width) of what `generate` makes noise of."""
        model: Any = self.config.model_spec.model
        return tuple(model.image_shape)

    def examples(self, most: int) -> Batch:
        """Return what `conditions` reads, for at most `most` different images."""
        model: Any = self.config.model_spec.model
        return {"classes": torch.arange(min(most, model.n_classes))}

    def build_dataloader(self, config: Any, *, epochs: int | None) -> Any:
        """Build the loader, and check that the model has its classes."""
        loader = super().build_dataloader(config, epochs=epochs)
        model: Any = self.config.model_spec.model
        n_classes = len(getattr(loader, "classes", ()))
        if n_classes > model.n_classes:
            raise UserError(
                f"the data has {n_classes} classes, and the model {model.n_classes}; set "
                f"--model.n_classes {n_classes}"
            )
        return loader

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's images, and their number without padding: the same
        on all context-parallel ranks, since the model joins their tokens."""
        x, noise = batch["pixels"], batch["noise"]
        times_B = self.loss.times(batch["uniform"][:, 0])
        dropped_B = self.loss.is_dropped(batch["uniform"][:, 1])
        velocity = self.velocity(
            self.loss.at_time(x, noise, times_B),
            times_B,
            self.model_parts[0].without_conditions(self.conditions(batch), dropped_B),  # type: ignore[operator]
        )
        weights_B = batch["weights"]
        losses_B = self.loss.losses(velocity, x, noise) * weights_B
        numbers_B = buckets(times_B)
        for number, name in enumerate(self.measures_named):
            is_in_B = numbers_B == number
            self.measure(name, (losses_B * is_in_B).sum().detach(), (weights_B * is_in_B).sum())
        return losses_B.sum(), weights_B.sum()

    def conditions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the arguments of the model that describe the images of a batch."""
        return {"classes": batch["classes"]}

    def velocity(self, x: Tensor, times_B: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Return the model's velocities at points x (B, C, H, W) and times (B,), float32."""
        velocity: Tensor = self.models["model"](x, times_B, **conditions)
        return velocity.float()  # guidance multiplies the difference of two, which are similar

    def generate(
        self, noise: Tensor, conditions: Mapping[str, Tensor], times: Tensor, guidance: float
    ) -> Tensor:
        """Return images between -1 and 1, from `noise` under `conditions`."""
        from torchtitan.components.diffusion.sampler import euler, guided

        (model,) = self.model_parts
        everything = torch.ones(len(noise), dtype=torch.bool, device=noise.device)
        without = model.without_conditions(conditions, everything)  # type: ignore[operator]
        velocity = guided(
            lambda x, t: self.velocity(x, t, conditions),
            lambda x, t: self.velocity(x, t, without),
            guidance,
        )
        with evaluating(model), self.mixed_precision():
            return self.to_images(euler(velocity, noise, times)).clamp(-1, 1)

    def to_images(self, x: Tensor) -> Tensor:
        """Return images from what the model is trained on."""
        return x
