"""The callback that generates images during training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.diffusion.sampler import times_of
from torchtitan.config.sections import require_at_least
from torchtitan.tools import durable
from torchtitan.tools.errors import require
from torchtitan.trainer.callbacks import PeriodicEvaluation
from torchtitan.trainer.run import Run


class Samples(PeriodicEvaluation):
    """Generate images of each class, or of the first captions, from the same noise, and write them
    as a grid, one row for each, to `samples/step-N.png` in the dump folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicEvaluation.Config):
        """Images generated during training."""

        freq: int = 0
        """Training steps between generations, and once at the end; 0: never."""

        per_class: int = 8
        """Images of each class, or of each caption."""

        max_classes: int = 16
        """Generate the first classes only, or captions of the training data."""

        steps: int = 50
        """Steps of Euler's method."""

        guidance: float = 2.0
        """Scale of classifier-free guidance; 1: none."""

        shift: float = 1.0
        """Above 1: spend more steps at high noise, as for large images."""

        def is_on(self, run: Run) -> bool:
            return self.freq > 0

        def validate(self) -> None:
            require_at_least(0, callbacks__samples__freq=self.freq)
            for name in ("per_class", "max_classes", "steps"):
                require_at_least(1, **{f"callbacks__samples__{name}": getattr(self, name)})
            for name in ("guidance", "shift"):
                value = getattr(self, name)
                require(value > 0, f"--callbacks.samples.{name}", value, "above 0")

    config: Config

    @property
    def period(self) -> int:
        return self.config.freq

    def evaluate(self) -> None:
        """Generate the images, and write them."""
        trainer: Any = self.trainer
        with trainer.evaluated_weights(averaged=trainer.config.ema.for_validation):
            images = self.generate()
        if trainer.rank == 0:
            path = Path(trainer.config.dump_folder) / "samples" / f"step-{trainer.step}.png"
            write_grid(path, images, self.config.per_class)

    def generate(self) -> Tensor:
        """Return images, (classes x per_class, C, H, W) between -1 and 1, class by class."""
        trainer: Any = self.trainer
        per_class = self.config.per_class
        batch = {
            name: values.repeat_interleave(per_class, dim=0).to(trainer.device)
            for name, values in trainer.examples(self.config.max_classes).items()
        }
        n_images = len(next(iter(batch.values())))
        shape = (n_images, *trainer.sampled_shape)
        random = np.random.Generator(np.random.Philox(key=trainer.config.debug.seed))
        noise = torch.from_numpy(random.standard_normal(shape, np.float32)).to(trainer.device)
        times = times_of(self.config.steps, self.config.shift, trainer.device)
        images: Tensor = trainer.generate(
            noise, trainer.conditions(batch), times, self.config.guidance
        )
        return images


def to_pixels(images: Tensor) -> np.ndarray:
    """Return images between -1 and 1, (N, C, H, W), as uint8, (N, H, W, C)."""
    values = ((images.float() + 1) * 127.5).round().clamp(0, 255).byte()
    return values.movedim(1, -1).cpu().numpy()


def write_grid(path: Path, images: Tensor, n_columns: int) -> None:
    """Write images (N, C, H, W) between -1 and 1 as a PNG with `n_columns` in a row, and a pixel of
    black between them."""
    from PIL import Image

    pixels = np.pad(to_pixels(images), ((0, 0), (0, 1), (0, 1), (0, 0)))
    rows = [np.concatenate(list(row), axis=1) for row in np.split(pixels, len(pixels) // n_columns)]
    grid = np.concatenate(rows, axis=0)
    durable.make_folder(path.parent)
    with durable.in_place_of(path) as unfinished:
        Image.fromarray(grid[..., 0] if grid.shape[-1] == 1 else grid).save(unfinished, "PNG")
