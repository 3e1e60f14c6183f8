"""The form of texts of classes that read one image before each text, such as BLIP-2's."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.pretraining.token_cache import around
from torchtitan.components.images.forms.form import Expansion, ImageForm, repeated
from torchtitan.components.images.opened import Opened, Samples, Size
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object


class CaptionForm(ImageForm):
    """Texts of one image, which a chat template writes as one token, and what follows it."""

    names = {"Blip2Processor", "BlipProcessor", "GitProcessor"}

    def __init__(self, opened: Opened, token: str):
        name, tokenizer = opened.name, opened.processor.tokenizer
        token = token or tokenizer.mask_token or ""  # of a tokenizer without a token for images
        if not token:
            raise UserError(
                f"{name}: the tokenizer has no mask_token, which stands for an image here"
            )
        super().__init__(opened, token)
        self.image_tokens = self.find_image_tokens()
        bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self.before_caption, after = around(bare, list(tokenizer("a")["input_ids"]))
        eos_id = after[0] if after else opened.tokenizer.eos_id
        if eos_id is None:
            raise UserError(f"{name}: the tokenizer has no EOS, which ends a caption")
        self.eos_id = eos_id

    def find_image_tokens(self) -> list[int]:
        """Return the tokens of an image."""
        return [self.token_id] * _n_tokens(self.opened)

    def expand(self, sizes: Sequence[Size]) -> Expansion:
        return repeated(self.token, self.image_tokens, len(sizes))

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        flat = [image for sample in images for image in sample]
        outputs = self.opened.processor.image_processor(flat, return_tensors="pt")
        return self.opened.tensors(outputs, outputs)

    def document(self, ids: list[int], n_images: int) -> tuple[list[int], list[int]]:
        return [*ids[:n_images], *self.before_caption], [*ids[n_images:], self.eos_id]

    def n_placeholders(self, ids: np.ndarray) -> int:
        """Return 1. Raise `BrokenSample` unless rendered `ids` (L,) begin with the image, and have
        no other one."""
        places = np.flatnonzero(ids == self.token_id).tolist()
        if places != [0]:
            where = f"{len(places)} images, at the tokens {places[:3]}" if places else "no image"
            raise BrokenSample(
                f"this model reads one image before each text, and this one has {where}; write a "
                f"row for each image, with a chat template that begins with {self.token}"
            )
        return 1


def _n_tokens(opened: Opened) -> int:
    """Return the tokens of an image; 0 if layers of the decoder read it."""
    name, folder = opened.name, opened.folder
    if name == "BlipProcessor":
        return 0
    if name == "GitProcessor":
        config = read_object(folder / "config.json")
        if "vision_config" not in config:
            raise UserError(
                f"'{folder}' has no config.json with a vision_config, which gives the number of "
                f"hidden states of an image for {name}; use the folder of the published model, or "
                "one of `torchtitan convert --to hf`"
            )
        if config.get("num_image_with_embedding") is not None:
            raise UserError(
                "config.json: num_image_with_embedding is set, so that the class reads the images "
                "of a video; train a model of another type"
            )
        from transformers import GitVisionConfig

        vision = GitVisionConfig(**(config["vision_config"] or {}))
        size, patch = vision.image_size, vision.patch_size
        assert isinstance(size, int) and isinstance(patch, int)
        return (size // patch) ** 2 + 1
    n_queries: int | None = getattr(opened.processor, "num_query_tokens", None)
    if n_queries is None:
        raise UserError(
            f"{name}: processor_config.json has no num_query_tokens, the number of tokens of an "
            "image; set it to the num_query_tokens of config.json"
        )
    return n_queries
