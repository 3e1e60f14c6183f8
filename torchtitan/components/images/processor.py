"""`ImageProcessor`, the processor of a model's Hugging Face folder: token ids in the place of
images, and the tensors of their pixels, computed by the classes of transformers.

Source: transformers 5.23.0, processing_utils.py (`ProcessorMixin`) and models/auto.
"""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.images.captions import CaptionForm, find_caption_form
from torchtitan.components.images.leading import LeadingForm, find_leading_form
from torchtitan.components.images.opening import (
    CONFIGS,
    OPTIONAL_CONFIGS,
    BackEnd,
    back_end_of,
    check_packages,
    open_processor,
)
from torchtitan.components.images.prefixes import PrefixForm, find_prefix_form
from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.protocols.images import TOKEN_TYPES
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger, without_logs

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Width and height of an image, in pixels."""

_PACKAGES = {
    "pillow": ("transformers", "pillow"),
    "torchvision": ("transformers", "pillow", "torchvision"),
}
"""Back end → packages that decide pixels; Pillow decodes the images of both."""

_OF_TEXT = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "special_tokens_mask",
        "labels",
    }
)
"""Results of a processor that describe its text."""

_OF_BOTH = frozenset({"cross_attention_mask"})
"""Results that depend on text and images; the call of the class makes them of token ids."""

_WRITTEN = frozenset({"PPChart2TableProcessor"})
"""Processors that leave all tokens of an image to the chat template. All images have as many,
`image_seq_length` of config.json, which also has the id of the token."""

_JOINED = frozenset({"PerceptionLMProcessor"})
"""Processors that do not stack images with different numbers of tiles. Their classes join the tiles
of all images, and so get those of a batch as if they were of one image."""

_TRIAL_SIZES: tuple[Size, Size] = ((96, 64), (60, 120))
_CACHED_SAMPLES = 128
_QUICK = {"resample": 0, "do_rescale": False, "do_normalize": False}
"""Options that leave sizes unchanged, and take a third of the time: nearest neighbors, and pixels
from 0 to 255."""


class ImageProcessor:
    """The processor of a model's folder; create it with `from_folder`."""

    token_id: int
    """Id of the token that the chat template writes `n_written` times for an image."""
    token: str
    """The text of this token."""
    files: dict[str, Path]
    """Name → path of the files that an export needs."""
    fingerprint: str
    """Hexadecimal digest of everything that decides token ids and pixels: files, class, back end,
    and versions of transformers, Pillow, and torchvision if it is the back end."""
    marked: dict[str, list[int]]
    """Name → ids of tokens of type 1, of each further argument of the class for types of tokens."""
    n_written: int
    """Tokens that the chat template writes for an image: one, or all tokens of an image."""
    prefix_form: PrefixForm | None
    """The form of texts, for a class that divides them into a prompt and its answer."""
    leading_form: LeadingForm | None
    """The form of images, for a processor that puts one before each text."""
    caption_form: CaptionForm | None
    """The form of texts, for a class that reads one image before each of them."""
    joins_text: bool
    """True if the text in the place of an image begins or ends with ordinary text, such as the line
    breaks of Gemma 3, or if the processor changes the text next to an image. Token ids then
    depend on the text around the image: `read` the text, instead of putting `expansions` into token
    ids."""

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
            processor = open_processor(folder, back_end)
        self = cls(processor, tokenizer, folder)
        self.files = files
        found = back_end_of(processor.image_processor)
        image_class = type(processor.image_processor).__name__
        if back_end not in ("auto", found):
            raise UserError(
                f"--dataloader.image_back_end {back_end}: {image_class} is computed with {found} "
                f"only; choose {found} or auto"
            )
        written = [self.token, self.n_written] if self.n_written > 1 else []
        self.fingerprint = _digest([contents, self._name, image_class, found, *written], found)
        logger.info(f"images: {self._name} of '{folder}', computed with {found}")
        self._try()
        return self

    def __init__(self, processor: Any, tokenizer: Tokenizer, folder: Path):
        self._processor = processor
        self._tokenizer = tokenizer
        self._name = type(processor).__name__
        names = ("image_placeholder_token", "image_token")  # the first one is Qianfan-OCR's
        self.token = str(next(filter(None, (getattr(processor, name, None) for name in names)), ""))
        self.n_written = 1
        self.prefix_form = None
        self.leading_form = find_leading_form(processor, _noise()[0])
        if self.leading_form is not None:
            self.token = processor.tokenizer.convert_ids_to_tokens(self.leading_form.ids[0])
        self.caption_form = find_caption_form(processor, tokenizer, folder)
        if self.caption_form is not None:
            self.token = self.caption_form.token
        if not self.token and self._name in _WRITTEN:
            written_id, self.n_written = _written_tokens(folder, self._name)
            self.token = tokenizer.decode([written_id])
        if not self.token:
            raise UserError(
                f"{self._name} has no token that stands for an image in a text: its class takes "
                "one image before each text, or images in another way that conversations do not "
                "have; train a model of another type"
            )
        token_id = tokenizer.id_of(self.token)
        if token_id is None:
            raise UserError(
                f"{self._name} writes {self.token!r} for an image, which is not one token of the "
                "tokenizer; use the tokenizer of the published model"
            )
        self.token_id = token_id
        # HunYuan's class wants both tokens around.
        around = [getattr(processor, f"image_{name}_token", None) for name in ("start", "end")]
        before, after = around if all(isinstance(each, str) for each in around) else ("", "")
        self._written = f"{before}{self.token * self.n_written}{after}"
        self._is_flat = False
        self._tensors = None if self._name in _JOINED else "pt"
        self._rewrites = False  # it returns no texts in the place of images
        self._begin = ""
        has_form = self.leading_form or self.caption_form
        own_ids = [] if has_form else processor.image_token_ids
        self._image_ids = [i for i in own_ids if i is not None] or [token_id]
        self._cached = functools.lru_cache(maxsize=_CACHED_SAMPLES)(self._blank_replacements)

    @property
    def image_ids(self) -> frozenset[int]:
        """Ids of the tokens of images, which answers cannot contain."""
        return frozenset(self._image_ids)

    def replacements(self, sizes: Sequence[Size]) -> list[str]:
        """Return the texts that replace the placeholder token of each image of a sample, whose
        sizes are given in order. Raise `UserError` for sizes that the processor refuses."""
        texts, _ = self._cached(tuple(sizes))
        return list(texts)

    def read(self, text: str, sizes: Sequence[Size], first: int) -> list[int]:
        """Return the token ids of a part of a sample with images of `sizes`. The ids of the part's
        images, from the `first` on, replace their placeholders. Raise `UserError` for sizes that
        the processor refuses."""
        before, *others = text.split(self.token)
        if self._rewrites:
            images = _blank_images(sizes[first : first + len(others)])
            return self._read(text, images, **self._quick())
        texts = self.replacements(sizes)[first : first + len(others)]
        whole = before + "".join(new + other for new, other in zip(texts, others, strict=True))
        [ids] = self._tokenizer.tokenize([whole], allow_special=True)
        return ids

    def expansions(self, sizes: Sequence[Size]) -> list[list[int]]:
        """Return the token ids of the `replacements`, each tokenized by itself."""
        _, ids = self._cached(tuple(sizes))
        return [each.tolist() for each in ids]

    def inputs(self, images: Sequence[Sequence["Image"]]) -> dict[str, Tensor]:
        """Return the arguments of the class for the images of each sample of a batch. Samples may
        have no images, but at least one has. Floating-point tensors are in float32."""
        if self.leading_form is not None:
            form, flat = self.leading_form, [image for sample in images for image in sample]
            outputs = form.call(self._processor, flat)
            return {name: self._tensor(name, outputs[name]) for name in form.tensors}
        if self.caption_form is not None:
            flat = [image for sample in images for image in sample]
            pixels = self._processor.image_processor(flat, return_tensors="pt")
            return {name: self._tensor(name, pixels[name]) for name in pixels}
        outputs = self._call([sample for sample in images if sample])
        return {name: self._tensor(name, outputs[name]) for name in self._names(outputs)}

    def blank_inputs(self) -> dict[str, Tensor]:
        """Return the arguments of the class for a white image; some classes ignore pixels of 0."""
        from PIL import Image

        return self.inputs([[Image.new("RGB", _TRIAL_SIZES[0], "white")]])

    def n_placeholders(self, ids: np.ndarray) -> int:
        """Return the number of images that the placeholders in a text's token ids stand for. Raise
        `UserError` if a template wrote another number of tokens for an image than the class reads.
        """
        if self.caption_form is not None:
            self.caption_form.check(ids)
        places = np.flatnonzero(ids == self.token_id)
        n_images, rest = divmod(len(places), self.n_written)
        starts = places[:: self.n_written]
        if rest or (places != np.add.outer(starts, np.arange(self.n_written)).flatten()).any():
            raise UserError(
                f"the chat template writes {len(places)} tokens {self.token} for images, and an "
                f"image needs {self.n_written}, one after the other"
            )
        return n_images

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        """Return the types of tokens: 1 for tokens of images, and 0 for others."""
        if self.leading_form is not None:
            return (self.leading_form.mask(ids) == 1).astype(np.int64)
        return np.isin(ids, self._image_ids).astype(np.int64)

    def more_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the further arguments of the class for types of tokens, by name."""
        types = {
            name: np.isin(ids, marked).astype(np.int64) for name, marked in self.marked.items()
        }
        if self.prefix_form is not None:
            types[TOKEN_TYPES] = self.prefix_form.token_types(ids)
        if self.leading_form is not None:
            types[self.leading_form.name] = self.leading_form.mask(ids)
        return types

    def _blank_replacements(self, sizes: tuple[Size, ...]) -> tuple[list[str], list[np.ndarray]]:
        if not sizes:
            return [], []
        if self.leading_form is not None:
            of_image = np.array(self.leading_form.ids, dtype=np.int32)
            return [self._written] * len(sizes), [of_image] * len(sizes)
        if self.caption_form is not None:
            of_image = np.full(self.caption_form.n_tokens, self.token_id, dtype=np.int32)
            return [self.token] * len(sizes), [of_image] * len(sizes)
        if self.n_written > 1:
            marks = np.full(self.n_written, self.token_id, dtype=np.int32)
            return [self._written] * len(sizes), [marks] * len(sizes)
        images, options = _blank_images(sizes), self._quick()
        if self._rewrites:
            found = [self._read(self._written, [image], **options) for image in images]
            return [], [np.array(each, dtype=np.int32) for each in found]
        self._call([images], **options)
        texts = list(self._processor.replacements)
        ids = self._tokenizer.tokenize(texts, allow_special=True)
        return texts, [np.array(each, dtype=np.int32) for each in ids]

    def _quick(self) -> dict[str, Any]:
        known = self._processor.image_processor
        return {name: value for name, value in _QUICK.items() if hasattr(known, name)}

    def _read(self, text: str, images: Sequence["Image"], **options: Any) -> list[int]:
        """Return the token ids that the processor itself makes of a text with images."""
        [ids] = self._call([images], [f"{self._begin}{text}"], **options)["input_ids"]
        return list(ids[1:] if self._begin else ids)

    def _call(
        self,
        images: Sequence[Sequence["Image"]],
        texts: Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Call the processor with texts, by default of placeholders only, the images of each, and
        options for images."""
        nested = [list(sample) for sample in images]
        flat = [image for sample in nested for image in sample]
        has_padding = getattr(self._processor.tokenizer, "pad_token", None) is not None
        self._processor.replacements = ()
        try:
            return self._processor(
                images=flat if self._is_flat else nested,
                text=list(texts or (self._written * len(sample) for sample in nested)),
                images_kwargs={"return_tensors": self._tensors, **options},
                text_kwargs={
                    "return_tensors": None,
                    # ERNIE's class makes one array of the types of all samples' tokens
                    "padding": has_padding and len(nested) > 1,
                    "add_special_tokens": False,
                },
            )
        except Exception as error:  # processors raise various types
            sizes = [f"{image.width} x {image.height}" for image in flat]
            raise UserError(
                f"{self._name} refuses images of {', '.join(sizes[:8])} pixels: {in_words(error)}"
            ) from error

    def _first_call(self, images: Sequence[Sequence["Image"]]) -> Any:
        """Find whether the processor takes images by sample, or in one list."""
        try:
            return self._call(images)
        except UserError as error:
            self._is_flat = True
            try:
                return self._call(images)
            except UserError:
                cause = error.__cause__
                assert isinstance(cause, Exception)
                raise UserError(
                    f"{self._name} does not take a text with two images in their places: "
                    f"{in_words(cause)}"
                ) from cause

    @staticmethod
    def _names(outputs: Any) -> list[str]:
        """Return the names of results that the class takes for images."""
        unused = _OF_TEXT | _OF_BOTH
        return [name for name in outputs if name not in unused and not name.endswith(TOKEN_TYPES)]

    def _marked(self, outputs: Any) -> dict[str, list[int]]:
        """Return `marked` of the results for a sample."""
        [ids] = outputs["input_ids"]
        marked = {}
        for name in outputs:
            if name in _OF_TEXT or not name.endswith(TOKEN_TYPES):
                continue
            [types] = outputs[name]
            marked[name] = sorted({i for i, type_ in zip(ids, types, strict=True) if type_ == 1})
            if list(types) != np.isin(ids, marked[name]).tolist():
                raise UserError(f"{self._name} gives {name} of one token several values")
        return marked

    def _tensor(self, name: str, value: Any) -> Tensor:
        if self._name in _JOINED:
            value = torch.cat(list(value))[None]
        try:
            tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self._name} returns {name} of images in one batch with different shapes"
            ) from error
        return tensor.float() if tensor.is_floating_point() else tensor

    def _try(self) -> None:
        """Process two images, and compare the results."""
        images = _noise()
        if self.leading_form is not None or self.caption_form is not None:
            self._check_tensors(self.inputs([images]))
            self.joins_text, self.marked = False, {}
            return
        self.prefix_form = find_prefix_form(self._processor, self._tokenizer, images[0])
        if self.prefix_form is None and self._places_images(images[0]):
            raise UserError(
                f"{self._name} puts one image before each text itself, so that a conversation "
                "cannot place its images; train a model of another type"
            )
        outputs = self._first_call([images])
        texts = list(self._processor.replacements)
        if self.n_written > 1:
            texts = self.replacements(_TRIAL_SIZES)
        self._rewrites = not texts and self._has_tokens_of_images(outputs)
        if self._rewrites:
            self._try_rewriting(images)
        elif len(texts) != len(images):
            raise UserError(f"{self._name} does not return the text in the place of each image")
        elif texts != self.replacements(_TRIAL_SIZES):
            raise UserError(
                f"{self._name} gives images of the same size different numbers of tokens, by their "
                "content, so that the length of a sample is not known before its images are decoded"
            )
        self._check_results(images, outputs)
        self.joins_text = self._rewrites or any(self._joins(text) for text in texts)
        [own] = outputs["input_ids"]
        if not self._rewrites:
            self._check_ids(texts, own)
        self.marked = self._marked(outputs)
        if self._processor.return_mm_token_type_ids:
            names = ("mm_token_type_ids", "token_type_ids")
            [types] = next(outputs[name] for name in names if name in outputs)
            if types != self.token_types(np.array(own)).tolist():
                raise UserError(f"{self._name} has types of tokens besides images and text")

    def _check_results(self, images: Sequence["Image"], outputs: Mapping[str, Any]) -> None:
        """Raise `UserError` if the results for two images are not arguments of the class for images
        and text alone."""
        if "labels" in outputs and self.prefix_form is None:
            raise UserError(
                f"{self._name} divides a text into a prompt and an answer, which conversations "
                "with several turns do not have"
            )
        known = self._processor.image_processor(images, return_tensors=self._tensors)
        names = known if isinstance(known, Mapping) else ("pixel_values",)
        if unknown := [name for name in self._names(outputs) if name not in names]:
            raise UserError(f"{self._name} also returns {', '.join(unknown)}, for text and images")
        self._check_tensors(self.inputs([images]))

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if bad or not tensors:
            raise UserError(f"{self._name} returns no finite values for {bad or 'images'}")

    def _check_ids(self, texts: Sequence[str], own: Sequence[int]) -> None:
        """Raise `UserError` if the tokenizer of the run writes other ids for the texts of images
        than the processor's `own`. More may follow, and a token may precede."""
        token = self.token * self.n_written
        whole = "".join(self._written.replace(token, text) for text in texts)
        [ids] = self._tokenizer.tokenize([whole], allow_special=True)
        if own[: len(ids)] == ids:
            return
        if own[1 : len(ids) + 1] == ids:
            begin = self._processor.tokenizer.convert_ids_to_tokens(own[0])
            _warn_of_beginning(self._name, begin)
            return
        raise UserError(
            f"{self._name} writes other token ids in the place of images than the tokenizer "
            f"of this run, {own[:8]} instead of {ids[:8]}; use the tokenizer of the folder"
        )

    def _places_images(self, image: "Image") -> bool:
        """Return whether the processor places an image that a text does not place."""
        images = {"images": [image], "text": ["text"]}
        try:
            _, [text], *_ = self._processor.prepare_inputs_layout(**images)
            if self.token in text:
                return True
            outputs = self._processor(**images, text_kwargs={"return_tensors": None})
        except Exception:  # processors raise various types
            return False
        return self.token_id in outputs["input_ids"][0]

    def _has_tokens_of_images(self, outputs: Any) -> bool:
        [ids] = outputs["input_ids"]
        return not set(self._image_ids).isdisjoint(ids)

    def _try_rewriting(self, images: Sequence["Image"]) -> None:
        """Compare what the processor makes of two images with blank ones, each by itself."""
        begin = self._processor.tokenizer.bos_token_id
        text = f"\n{self.token}\n{self.token}\n"
        if begin is not None and self._read(text, images)[0] == begin:
            self._begin = self._processor.tokenizer.bos_token  # needed in each text
            _warn_of_beginning(self._name, self._begin)
        ids = self._read(text, images)
        special = self._tokenizer.special_ids
        alone = [i for each in self.expansions(_TRIAL_SIZES) for i in each]
        outside = self._tokenizer.decode([i for i in ids if i not in special])
        ends = {ids[0], ids[-1]}
        if [i for i in ids if i in special] != alone or outside.strip() or ends & special:
            raise UserError(
                f"{self._name} does not write the tokens of an image in the place of its "
                "placeholder"
            )

    def _joins(self, text: str) -> bool:
        """Return whether other text next to `text` changes its token ids."""
        parts = ["\n", text, "\n"]
        whole, *ids = self._tokenizer.tokenize(["".join(parts), *parts], allow_special=True)
        return whole != [token for part in ids for token in part]


@functools.cache  # a run opens its processor several times
def _warn_of_beginning(name: str, token: str) -> None:
    logger.warning(
        "%s begins each text with %r; conversations begin as their chat template writes: let it "
        "write the token if the model expects it",
        name,
        token,
    )


def _noise() -> list["Image"]:
    """Return the images of the trial."""
    from PIL import Image

    noise = np.random.default_rng(0)
    return [
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in _TRIAL_SIZES
    ]


def _blank_images(sizes: Sequence[Size]) -> list["Image"]:
    from PIL import Image

    return [Image.new("RGB", size) for size in sizes]


def _written_tokens(folder: Path, name: str) -> tuple[int, int]:
    """Return the id of the token that a chat template writes for an image, and how often. Raise
    `UserError` without a config.json."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(
            f"'{folder}' has no config.json, which names the tokens of an image for {name}; use "
            "the folder of the published model, or one of `torchtitan convert --to hf`"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.image_token_id, config.image_seq_length


def _digest(parts: Sequence[Any], back_end: str) -> str:
    versions = [importlib.metadata.version(name) for name in _PACKAGES[back_end]]
    text = json.dumps([*parts, *versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
