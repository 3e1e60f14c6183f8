"""The form of texts of encoder-decoders, such as Donut: the encoder reads one image, and a sample
has the tokens of the decoder."""

from collections.abc import Sequence

import numpy as np

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.pretraining.token_cache import around
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.forms.caption import CaptionForm
from torchtitan.components.images.opened import Opened, noise
from torchtitan.tools.errors import UserError

_START = "decoder_start_token_id"


class DecoderForm(CaptionForm):
    """Texts of one token that stands for the image, a prompt, if the decoder reads one, and an
    answer. The first token becomes the one that starts the decoder: the class shifts labels by it.
    """

    names = {"DonutProcessor", "NougatProcessor", "TrOCRProcessor"}
    reads_prompts = True

    def __init__(self, opened: Opened, token: str):
        tokenizer = opened.processor.tokenizer
        super().__init__(opened, token or tokenizer.mask_token or tokenizer.pad_token or "")
        encoder = getattr(self.config, "encoder", None)
        self._is_donut = "donut" in getattr(encoder, "model_type", "")
        self.identity = (*self.image_tokens, self._is_donut)
        bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        labels = np.array(opened.processor(images=noise()[0], text="a")["labels"])
        self.before_caption, _ = around(bare, labels.flatten().tolist())

    def find_image_tokens(self) -> list[int]:
        """Return the token that starts the decoder."""
        self.config = self.opened.config(f"{_START}, which begins each answer")
        start_id = getattr(self.config, _START, None)
        if start_id is None:
            raise UserError(
                f"config.json of '{self.opened.folder}' has no {_START}, the token that begins "
                "each answer; set it as the model was trained"
            )
        return [start_id]

    def document(self, ids: list[int], n_images: int) -> tuple[list[int], list[int]]:
        return ids[:n_images], [*self.before_caption, *ids[n_images:], self.eos_id]

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        """Return the images with the prompt, by which `kept` finds it."""
        text = self.opened.tokenizer.decode([one for one in ids if one != self.token_id])
        return [image._replace(prompt=text) for image in images]

    def kept(
        self, ids: np.ndarray, trained: np.ndarray | None, images: Sequence[ImageFile]
    ) -> np.ndarray:
        stop = len(ids)
        if trained is not None and trained.any():
            stop = int(trained.argmax())
            if self.opened.tokenizer.decode(ids[1:stop].tolist()) != images[0].prompt:
                raise BrokenSample(
                    "this model is trained on an answer after its whole prompt; use a chat "
                    "template that writes both in this order, and train on the assistant only"
                )
        places = np.arange(len(ids))
        return self.without_prompt(places, stop)

    def without_prompt(self, places: np.ndarray, stop: int) -> np.ndarray:
        """Return those of the places of a text's tokens that the decoder reads. Its prompt ends
        before `stop`. As transformers generates with Donut's encoder, the prompt begins with the
        token of a task, in the place of the usual start."""
        return places[1:] if self._is_donut and stop > 1 else places
