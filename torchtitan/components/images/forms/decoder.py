"""The form of texts of encoder-decoders, such as Donut: the encoder reads one image, and a sample
has the tokens of the decoder."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor

from torchtitan.components.data.finetuning.conversation import BrokenSample, shortened
from torchtitan.components.images.files import PROMPT, ImageFile
from torchtitan.components.images.forms.caption import CaptionForm
from torchtitan.components.images.opened import Opened, Samples, noise
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.files import read_object

_START = "decoder_start_token_id"


class DecoderForm(CaptionForm):
    """Texts of a token for the image, a prompt, EOS, and an answer. The start token of the decoder,
    by which the class shifts labels, replaces the token of the image. EOS only keeps the tokens of
    the prompt and the answer apart, and is optional."""

    names = {"DonutProcessor", "NougatProcessor", "TrOCRProcessor"}
    reads_prompts = True

    def __init__(self, opened: Opened, token: str):
        tokenizer = opened.processor.tokenizer
        super().__init__(opened, tokenizer.mask_token or tokenizer.pad_token or "")
        if self.token_id == self.eos_id:
            raise UserError(
                f"{opened.name}: {self.token!r} marks an image here and ends answers; name a "
                "token that no answer has as mask_token in tokenizer_config.json"
            )
        encoder = getattr(self.config, "encoder", None)
        self._is_donut = "donut" in getattr(encoder, "model_type", "")
        self.identity = (*self.image_tokens, self._is_donut)
        if opened.name in ("DonutProcessor", "Gemma3Processor"):  # whose labels do not begin so
            self.before_caption = []

    def find_image_tokens(self) -> list[int]:
        """Return the token that starts the decoder."""
        self.config = self.opened.config(f"{_START}, which begins each answer")
        start_id = self.start_of(self.config)
        if start_id is None:
            raise UserError(
                f"config.json of '{self.opened.folder}' has no {_START}, the token that begins "
                "each answer; set it as the model was trained"
            )
        return [start_id]

    def start_of(self, config: Any) -> int | None:
        """Return the token that starts the decoder by the configuration of the class."""
        start_id: int | None = getattr(config, _START, None)
        return start_id

    def document(self, ids: list[int], n_images: int) -> tuple[list[int], list[int]]:
        return ids[:n_images], [*self.before_caption, *ids[n_images:], self.eos_id]

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        """Return the images with the prompt, so that `kept` finds it."""
        text = self._text([one for one in ids if one != self.token_id])
        return [image._replace(prompt=text) for image in images]

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt without the EOS at its end."""
        return self.opened.tokenizer.decode(ids[:-1] if self._is_ended(ids) else ids)

    def _is_ended(self, ids: Sequence[int]) -> bool:
        return len(ids) > 0 and ids[-1] == self.eos_id

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(ids.shape, np.int64)  # the encoder has those of the image

    def kept(
        self, ids: np.ndarray, trained: np.ndarray | None, images: Sequence[ImageFile]
    ) -> np.ndarray:
        stop = len(ids)
        if trained is not None and trained.any():
            stop = int(trained.argmax())
            if self._text(ids[1:stop].tolist()) != images[0].prompt:
                raise BrokenSample(
                    "this model is trained on an answer after its whole prompt; use a chat "
                    "template that writes both in this order, and train on the assistant only"
                )
        end = stop - self._is_ended(ids[1:stop].tolist())
        return self.without_prompt(np.delete(np.arange(len(ids)), np.s_[end:stop]), end)

    def without_prompt(self, places: np.ndarray, stop: int) -> np.ndarray:
        """Return the `places` of tokens that the decoder reads. The prompt ends before `stop`. With
        Donut's encoder, the token of a task replaces the start token, as in transformers'
        `generate`."""
        return places[1:] if self._is_donut and stop > 1 else places


class PatchesForm(DecoderForm):
    """Pix2Struct's encoder reads patches of an image. A model for questions reads the prompt as a
    picture of its text, above the image."""

    names = {"Pix2StructProcessor"}

    def __init__(self, opened: Opened, token: str):
        self._reads_header = bool(getattr(opened.processor.image_processor, "is_vqa", False))
        super().__init__(opened, token)

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        images = super().with_prompt(images, ids)
        if self._reads_header and self.opened.processor.tokenizer.unk_token_id in ids:
            raise BrokenSample(
                "its prompt is drawn above the image, and has characters that the tokenizer does "
                f"not know: {shortened(images[0].prompt)}; write others"
            )
        return images

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        flat = [image for sample in images for image in sample]
        more: dict[str, Any] = {}
        if self._reads_header:
            more["header_text"] = [image.info.get(PROMPT, "") for image in flat]
        try:
            found = self.opened.processor.image_processor(flat, return_tensors="pt", **more)
        except OSError as error:
            raise UserError(
                f"{self.opened.name} writes prompts above images in a font that transformers "
                f"fetches from the Hugging Face Hub: {in_words(error)}"
            ) from error
        tensors = self.opened.tensors(found, found)
        return {"encoder_attention_mask": tensors.pop("attention_mask"), **tensors}

    def without_prompt(self, places: np.ndarray, stop: int) -> np.ndarray:
        return np.delete(places, np.s_[1:stop]) if self._reads_header else places


class PromptedDecoderForm(DecoderForm):
    """Florence-2's encoder reads the image and the prompt."""

    names = {"Florence2Processor"}

    def __init__(self, opened: Opened, token: str):
        super().__init__(opened, token)
        written = [one for one in opened.processor.image_token_ids if one is not None]
        self._image_texts = {opened.token, *(opened.tokenizer.decode([one]) for one in written)}
        [ids] = self.inputs([noise()[:1]])["encoder_input_ids"]
        self._n_image_tokens = len(ids) - self._n_written("")
        self.identity = (*self.identity, self.most)

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        images = super().with_prompt(images, ids)
        for image in images:
            if found := [token for token in self._image_texts if token in image.prompt]:
                raise BrokenSample(
                    f"its prompt has {found[0]}, which the encoder would read as an image; "
                    "remove it"
                )
            n_tokens = self._n_image_tokens + self._n_written(image.prompt)
            if n_tokens > self.most:
                raise BrokenSample(
                    f"its image and its prompt have {n_tokens:,} tokens for the encoder, which "
                    f"reads {self.most:,} at most; shorten the prompt"
                )
        return images

    @property
    def most(self) -> int:
        """Tokens that the encoder reads."""
        n_tokens: int = self.config.text_config.max_position_embeddings
        return n_tokens

    def start_of(self, config: Any) -> int | None:
        return super().start_of(config.text_config)

    def text_of(self, prompt: str) -> str:
        """Return the text with an image that the processor reads for a prompt."""
        return prompt

    def _n_written(self, prompt: str) -> int:
        """Return the number of tokens that the processor makes of a prompt, with one for the image.
        Raise `BrokenSample` if it refuses the prompt."""
        from PIL import Image

        processor = self.opened.processor
        try:
            _, [text], *_ = processor.prepare_inputs_layout(
                images=[[Image.new("RGB", (1, 1))]], text=[self.text_of(prompt)]
            )
        except ValueError as error:
            raise BrokenSample(
                f"{self.opened.name} refuses its prompt {shortened(prompt)}: {in_words(error)}"
            ) from error
        return len(processor.tokenizer(text)["input_ids"])

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        flat = [image for sample in images for image in sample]
        outputs = self.opened.processor(
            images=[[image] for image in flat],
            text=[self.text_of(image.info.get(PROMPT, "")) for image in flat],
            images_kwargs={"return_tensors": "pt"},
            text_kwargs={"padding": True, "padding_side": "right", "return_tensors": "pt"},
        )
        tensors = self.opened.tensors(outputs, ["input_ids", "attention_mask", "pixel_values"])
        pixels = {"pixel_values": tensors.pop("pixel_values")}
        return {f"encoder_{name}": one for name, one in tensors.items()} | pixels

    def without_prompt(self, places: np.ndarray, stop: int) -> np.ndarray:
        return np.delete(places, np.s_[1:stop])


class T5Gemma2Form(PromptedDecoderForm):
    """T5Gemma 2 reads the same, by the processor of Gemma 3."""

    names = {"Gemma3Processor"}

    @classmethod
    def find(cls, opened: Opened) -> Self | None:
        document = read_object(opened.folder / "config.json")
        if document.get("model_type") != "t5gemma2":
            return None
        if getattr(opened.processor.image_processor, "do_pan_and_scan", False):
            raise UserError(
                "preprocessor_config.json: do_pan_and_scan makes several images of one, and "
                "T5Gemma 2 reads one here; set false"
            )
        return super().find(opened)

    @property
    def most(self) -> int:
        n_tokens: int = self.config.encoder.text_config.max_position_embeddings
        return n_tokens

    def start_of(self, config: Any) -> int | None:
        start_id: int | None = config.decoder.bos_token_id
        return start_id

    def text_of(self, prompt: str) -> str:
        return f"{self.opened.token}{prompt}"
