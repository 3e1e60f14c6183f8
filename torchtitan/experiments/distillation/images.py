"""The trainer of distillation with images, which student and teacher read alike."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.images.rows_loader import processor_of
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import asset_folder
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols import ModelSpec
from torchtitan.tools.errors import UserError, errors_of
from torchtitan.trainer.config import Preflight

from .trainer import DistillationTrainer


class ImageDistillationTrainer(DistillationTrainer):
    """Train a student to predict what a teacher predicts after text and images. Classes of
    transformers compute both."""

    @dataclass(kw_only=True, slots=True)
    class Config(DistillationTrainer.Config):
        """A whole run of distillation with images."""

        def check(self, world_size: int, *, dry_run: bool = False) -> Preflight:
            preflight = DistillationTrainer.Config.check(self, world_size, dry_run=dry_run)
            if not dry_run:
                folder = asset_folder(Path(self.teacher.path))
                assert isinstance(self.dataloader, ImageDataLoader.Config)
                back_end = self.dataloader.image_back_end
                with errors_of("--teacher.path"):
                    teachers_tokenizer = PretrainedTokenizer.Config().build(path=folder)
                    theirs = processor_of(teachers_tokenizer, back_end)
                if theirs.fingerprint != processor_of(preflight.tokenizer, back_end).fingerprint:
                    raise UserError(
                        f"--teacher.path: the processor of images in '{folder}' differs from that "
                        "of the student, so they would read other pixels or tokens; choose a "
                        "teacher with the same preprocessor_config.json and processor_config.json"
                    )
            return preflight

        def teacher_spec(self) -> ModelSpec:
            from torchtitan.models import transformers  # takes seconds, and belongs to an extra

            if not self.teacher.path:
                return DistillationTrainer.Config.teacher_spec(self)
            with errors_of("--teacher.path"):
                spec, _ = internal_source(self.teacher.path, family=transformers)
                model = dataclasses.replace(spec.model, reads_images=True)  # type: ignore[call-arg]
                model.validate()
            return dataclasses.replace(spec, model=model)

    config: Config
