"""`ImageProcessor`, the processor of a model's Hugging Face folder: token ids in the place of
images, and the tensors of their pixels, computed by the classes of transformers."""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from torchtitan.components.images.forms import FORMS
from torchtitan.components.images.forms.form import ImageForm
from torchtitan.components.images.opened import TRIAL_SIZES, Opened, Samples, Size, noise
from torchtitan.components.images.opening import (
    CONFIGS,
    OPTIONAL_CONFIGS,
    BackEnd,
    back_end_of,
    check_packages,
    open_processor,
)
from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger, without_logs

_PACKAGES = {
    "pillow": ("transformers", "pillow"),
    "torchvision": ("transformers", "pillow", "torchvision"),
}
"""Back end → packages that decide pixels; Pillow decodes the images of both."""


class ImageProcessor:
    """The processor of a model's folder; create it with `from_folder`.

    Args:
        form: how texts have images.
        files: name → path of the files that an export needs.
        fingerprint: hexadecimal digest of everything that decides token ids and pixels: files,
            class, back end, and versions of transformers, Pillow, and torchvision if it is the back
            end.
    """

    def __init__(self, form: ImageForm, files: dict[str, Path], fingerprint: str):
        self.form = form
        self.files = files
        self.fingerprint = fingerprint
        self.token = form.token
        self.token_id = form.token_id
        self.n_written = form.n_written
        self.joins_text = form.joins_text

    @classmethod
    def from_folder(
        cls, folder: str | Path, tokenizer: Tokenizer, back_end: BackEnd = "auto"
    ) -> "ImageProcessor":
        """Open the processor of a folder, and try it with two small images. `tokenizer` is the
        tokenizer of the run. Raise `UserError` if files or packages are missing, if the processor
        does not have the back end, or if it cannot be used."""
        folder = Path(folder)
        names = (*CONFIGS, *OPTIONAL_CONFIGS)
        files = {name: folder / name for name in names if (folder / name).is_file()}
        if not files.keys() & set(CONFIGS):
            raise UserError(
                f"'{folder}' has no {' or '.join(CONFIGS)}, which describes the processor of "
                "images; copy it from the folder of the published model"
            )
        contents = {name: read_object(path) for name, path in files.items()}
        check_packages()
        with without_logs():
            opened = Opened(open_processor(folder, back_end), tokenizer, folder)
        found = back_end_of(opened.processor.image_processor)
        image_class = type(opened.processor.image_processor).__name__
        if back_end not in ("auto", found):
            raise UserError(
                f"--dataloader.image_back_end {back_end}: {image_class} is computed with {found} "
                f"only; choose {found} or auto"
            )
        logger.info(f"images: {opened.name} of '{folder}', computed with {found}")
        form = next(filter(None, (kind.find(opened) for kind in FORMS)))
        opened.check_finite(form.inputs([noise()]))
        parts = [contents, opened.name, image_class, found, *form.identity]
        return cls(form, files, _digest(parts, found))

    def replacements(self, sizes: Sequence[Size]) -> list[str]:
        """Return the texts that replace the placeholder token of each image of a sample, whose
        sizes are given in order. Raise `UserError` for sizes that the processor refuses."""
        return list(self.form.expand(sizes).texts)

    def expansions(self, sizes: Sequence[Size]) -> list[list[int]]:
        """Return the token ids of the `replacements`, each tokenized by itself."""
        return [ids.tolist() for ids in self.form.expand(sizes).ids]

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        """Return the arguments of the class for the images of each sample of a batch. Samples may
        have no images, but at least one has. Floating-point tensors are in float32."""
        return self.form.inputs(images)

    def blank_inputs(self) -> dict[str, Tensor]:
        """Return the arguments of the class for a white image; some classes ignore pixels of 0."""
        from PIL import Image

        return self.inputs([[Image.new("RGB", TRIAL_SIZES[0], "white")]])

    def n_placeholders(self, ids: np.ndarray) -> int:
        """See `ImageForm.n_placeholders`."""
        return self.form.n_placeholders(ids)

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        """See `ImageForm.token_types`."""
        return self.form.token_types(ids)


def _digest(parts: Sequence[object], back_end: str) -> str:
    versions = [importlib.metadata.version(name) for name in _PACKAGES[back_end]]
    text = json.dumps([*parts, *versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
