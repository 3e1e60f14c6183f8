"""Forms of processors that write the tokens of an image in the place of its placeholder."""

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.images.forms.form import Expansion, ImageForm, repeated
from torchtitan.components.images.opened import (
    TRIAL_SIZES,
    Images,
    Opened,
    Outputs,
    Samples,
    Size,
    blank,
    noise,
)
from torchtitan.protocols.images import TOKEN_TYPES
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

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

_CACHED_SAMPLES = 128


class PlainForm(ImageForm):
    """The processor returns the text that it writes in the place of each image."""

    divides_texts: ClassVar[bool] = False
    """True if the processor divides a text into a prompt and its answer."""
    return_tensors: ClassVar[str | None] = "pt"
    """Type of results for the images of a batch; None: a list of those of each image."""

    written: str
    """What a chat template writes for an image."""
    marked: dict[str, list[int]]
    """Name → ids of tokens of type 1, of each further argument of the class for types of tokens."""

    @classmethod
    def find(cls, opened: Opened) -> Self | None:
        if cls.names and opened.name not in cls.names:
            return None
        form = cls(opened, opened.token)
        form.refuse_places()
        return form if form.try_images() else None

    def __init__(self, opened: Opened, token: str, n_written: int = 1):
        if not token:
            raise UserError(
                f"{opened.name} has no token that stands for an image in a text: its class takes "
                "one image before each text, or images in another way that conversations do not "
                "have; train a model of another type"
            )
        super().__init__(opened, token)
        self.n_written = n_written
        processor = opened.processor
        # HunYuan's class wants both tokens around.
        around = [getattr(processor, f"image_{name}_token", None) for name in ("start", "end")]
        before, after = around if all(isinstance(each, str) for each in around) else ("", "")
        self.written = f"{before}{token * n_written}{after}"
        own = frozenset(token_id for token_id in processor.image_token_ids if token_id is not None)
        self.image_ids = own or self.image_ids
        self.marked = {}
        self._cached = functools.lru_cache(maxsize=_CACHED_SAMPLES)(self.expand_blank)

    def expand(self, sizes: Sequence[Size]) -> Expansion:
        return self._cached(tuple(sizes)) if sizes else Expansion([], [])

    def expand_blank(self, sizes: tuple[Size, ...]) -> Expansion:
        """Return the result of `expand`, of images without content."""
        self._call([blank(sizes)], **self.opened.quick_options)
        texts = list(self.opened.processor.replacements)
        ids = self.opened.tokenizer.tokenize(texts, allow_special=True)
        return Expansion(texts, [np.array(each, dtype=np.int32) for each in ids])

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        outputs = self._call([sample for sample in images if sample])
        return self.opened.tensors(outputs, _of_images(outputs))

    def _call(self, images: Samples, **options: object) -> Outputs:
        texts = [self.written * len(sample) for sample in images]
        return self.opened.call(images, texts, self.return_tensors, **options)

    def more_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.isin(ids, marked).astype(np.int64) for name, marked in self.marked.items()}

    def refuse_places(self) -> None:
        """Raise `UserError` if the processor places an image that a text does not place."""
        processor = self.opened.processor
        images = {"images": noise()[:1], "text": ["text"]}
        try:
            _, [text], *_ = processor.prepare_inputs_layout(**images)
            if self.token not in text:
                outputs = processor(**images, text_kwargs={"return_tensors": None})
                if self.token_id not in outputs["input_ids"][0]:
                    return
        except Exception:  # processors raise various types
            return
        raise UserError(
            f"{self.opened.name} puts one image before each text itself, so that a conversation "
            "cannot place its images; train a model of another type"
        )

    def try_images(self) -> bool:
        """Process two images, and compare the results; return whether the form fits."""
        images = noise()
        text = self.written * len(images)
        outputs = self.opened.first_call(images, text, self.return_tensors)
        if not self.fits(outputs):
            return False
        [own] = outputs["input_ids"]
        self.joins_text = self.compare_texts(own)
        self._check_results(images, outputs)
        self.marked = self._marked(outputs)
        if self.opened.processor.return_mm_token_type_ids:
            names = ("mm_token_type_ids", "token_type_ids")
            [types] = next(outputs[name] for name in names if name in outputs)
            if types != self.token_types(np.array(own)).tolist():
                raise UserError(f"{self.opened.name} has types of tokens besides images and text")
        return True

    def fits(self, outputs: Outputs) -> bool:
        """Return whether the results of the trial are those of a processor with this form."""
        return True

    def compare_texts(self, own: Sequence[int]) -> bool:
        """Return `joins_text`, from what the processor wrote in the trial, and its ids. Raise
        `UserError` if these depend on more than the sizes of images."""
        name, texts = self.opened.name, list(self.opened.processor.replacements)
        if len(texts) != len(TRIAL_SIZES):
            raise UserError(f"{name} does not return the text in the place of each image")
        if texts != self.expand(TRIAL_SIZES).texts:
            raise UserError(
                f"{name} gives images of the same size different numbers of tokens, by their "
                "content, so that the length of a sample is not known before its images are decoded"
            )
        return self.compare_ids(texts, own)

    def compare_ids(self, texts: Sequence[str], own: Sequence[int]) -> bool:
        """Return `joins_text` of the texts of images. Raise `UserError` if the tokenizer of the run
        writes other ids for them than the processor's `own`. More may follow, and a token may
        precede."""
        token = self.token * self.n_written
        whole = "".join(self.written.replace(token, text) for text in texts)
        [ids] = self.opened.tokenizer.tokenize([whole], allow_special=True)
        if own[1 : len(ids) + 1] == ids:
            begin = self.opened.processor.tokenizer.convert_ids_to_tokens(own[0])
            warn_of_beginning(self.opened.name, begin)
        elif own[: len(ids)] != ids:
            raise UserError(
                f"{self.opened.name} writes other token ids in the place of images than the "
                f"tokenizer of this run, {own[:8]} instead of {ids[:8]}; use the tokenizer of the "
                "folder"
            )
        return any(self._joins(text) for text in texts)

    def _joins(self, text: str) -> bool:
        """Return whether other text next to `text` changes its token ids."""
        parts = ["\n", text, "\n"]
        whole, *ids = self.opened.tokenizer.tokenize(["".join(parts), *parts], allow_special=True)
        return whole != [token for part in ids for token in part]

    def _check_results(self, images: Images, outputs: Outputs) -> None:
        """Raise `UserError` if the results for two images are not arguments of the class for images
        and text alone."""
        if "labels" in outputs and not self.divides_texts:
            raise UserError(
                f"{self.opened.name} divides a text into a prompt and an answer, which "
                "conversations with several turns do not have"
            )
        known = self.opened.processor.image_processor(images, return_tensors=self.return_tensors)
        names = known if isinstance(known, Mapping) else ("pixel_values",)
        if unknown := [name for name in _of_images(outputs) if name not in names]:
            raise UserError(
                f"{self.opened.name} also returns {', '.join(unknown)}, for text and images"
            )

    def _marked(self, outputs: Outputs) -> dict[str, list[int]]:
        """Return `marked` of the results for a sample."""
        [ids] = outputs["input_ids"]
        marked = {}
        for name in outputs:
            if name in _OF_TEXT or not name.endswith(TOKEN_TYPES):
                continue
            [types] = outputs[name]
            marked[name] = sorted({i for i, type_ in zip(ids, types, strict=True) if type_ == 1})
            if list(types) != np.isin(ids, marked[name]).tolist():
                raise UserError(f"{self.opened.name} gives {name} of one token several values")
        return marked


class JoinedForm(PlainForm):
    """The processor does not stack images with different numbers of tiles. Its class joins the
    tiles of all images, and so gets those of a batch as if they were of one image."""

    names = {"PerceptionLMProcessor"}
    return_tensors = None

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        outputs = self._call([sample for sample in images if sample])
        joined = {name: torch.cat(list(outputs[name]))[None] for name in _of_images(outputs)}
        return self.opened.tensors(joined, joined)


class WrittenForm(PlainForm):
    """The chat template writes all tokens of an image. All images have as many, `image_seq_length`
    of config.json, which also has the id of the token."""

    names = {"PPChart2TableProcessor"}

    def __init__(self, opened: Opened, token: str):
        config = opened.config("the tokens of an image")
        token = opened.tokenizer.decode([config.image_token_id])
        super().__init__(opened, token, config.image_seq_length)
        self.identity = (token, self.n_written)

    def expand_blank(self, sizes: tuple[Size, ...]) -> Expansion:
        return repeated(self.written, [self.token_id] * self.n_written, len(sizes))

    def compare_texts(self, own: Sequence[int]) -> bool:
        return self.compare_ids(self.expand(TRIAL_SIZES).texts, own)

    def n_placeholders(self, ids: np.ndarray) -> int:
        places = np.flatnonzero(ids == self.token_id)
        n_images, rest = divmod(len(places), self.n_written)
        starts = places[:: self.n_written]
        if rest or (places != np.add.outer(starts, np.arange(self.n_written)).flatten()).any():
            raise UserError(
                f"the chat template writes {len(places)} tokens {self.token} for images, and an "
                f"image needs {self.n_written}, one after the other"
            )
        return n_images


class RewritingForm(PlainForm):
    """The processor returns no texts, but the token ids of a text with its images."""

    begin: str = ""
    """Token that the processor needs before each text."""

    def fits(self, outputs: Outputs) -> bool:
        [ids] = outputs["input_ids"]
        return not self.opened.processor.replacements and not self.image_ids.isdisjoint(ids)

    def expand_blank(self, sizes: tuple[Size, ...]) -> Expansion:
        images, options = blank(sizes), self.opened.quick_options
        found = [self._ids(self.written, [image], **options) for image in images]
        return Expansion([], [np.array(each, dtype=np.int32) for each in found])

    def read(self, text: str, sizes: Sequence[Size], first: int) -> list[int]:
        images = blank(sizes[first : first + text.count(self.token)])
        return self._ids(text, images, **self.opened.quick_options)

    def _ids(self, text: str, images: Images, **options: object) -> list[int]:
        """Return the token ids that the processor itself makes of a text with images."""
        outputs = self.opened.call([images], [f"{self.begin}{text}"], **options)
        [ids] = outputs["input_ids"]
        return list(ids[1:] if self.begin else ids)

    def compare_texts(self, own: Sequence[int]) -> bool:
        """Compare what the processor makes of two images with blank ones, each by itself."""
        images = noise()
        tokenizer = self.opened.processor.tokenizer
        text = f"\n{self.token}\n{self.token}\n"
        begin = tokenizer.bos_token_id
        if begin is not None and self._ids(text, images)[0] == begin:
            self.begin = tokenizer.bos_token
            warn_of_beginning(self.opened.name, self.begin)
        ids = self._ids(text, images)
        special = self.opened.tokenizer.special_ids
        alone = np.concatenate(self.expand(TRIAL_SIZES).ids).tolist()
        outside = self.opened.tokenizer.decode([i for i in ids if i not in special])
        ends = {ids[0], ids[-1]}
        if [i for i in ids if i in special] != alone or outside.strip() or ends & special:
            raise UserError(
                f"{self.opened.name} does not write the tokens of an image in the place of its "
                "placeholder"
            )
        return True


def _of_images(outputs: Outputs) -> list[str]:
    """Return the names of results that the class takes for images."""
    unused = _OF_TEXT | _OF_BOTH
    return [name for name in outputs if name not in unused and not name.endswith(TOKEN_TYPES)]


@functools.cache  # a run opens its processor several times
def warn_of_beginning(name: str, token: str) -> None:
    """Warn that a processor begins each text with a token."""
    logger.warning(
        "%s begins each text with %r; conversations begin as their chat template writes: let it "
        "write the token if the model expects it",
        name,
        token,
    )
