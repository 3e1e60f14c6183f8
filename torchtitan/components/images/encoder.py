"""Encoding of conversations with images: the model's processor sets the number of tokens of each
image."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    IMAGE_PLACE,
    BrokenSample,
    Conversation,
    Sample,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.sft import ConversationEncoder
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError


class ImageEncoder(ConversationEncoder):
    """Encodes conversations and texts in batches, and replaces the placeholder of each image, which
    the chat template or the text has. The tokens of images are not trained."""

    stored = ("images",)
    can_fork = False

    def __init__(self, chat: ChatEncoder, processor: ImageProcessor, tokenizer: Tokenizer):
        super().__init__(chat)
        self._processor = processor
        self._tokenizer = tokenizer
        self._tokens = ImageTokens(processor, tokenizer)

    @property
    def fingerprint(self) -> str:
        return digest_of([super().fingerprint, self._processor.fingerprint])

    def encode_batch(self, samples: Sequence[Sample]) -> list[list[EncodedRow] | BrokenSample]:
        others = [sample for sample in samples if not _has_places(sample)]
        encoded = iter(super().encode_batch(others))
        results: list[list[EncodedRow] | BrokenSample] = []
        for sample in samples:
            if isinstance(sample, Text) and _has_places(sample):
                rows = self._try_encode_text(sample)
            else:
                rows = next(encoded)
            if not isinstance(rows, BrokenSample):
                rows = self._try_expand(sample, rows)
            results.append(rows)
        return results

    def _try_encode_text(self, sample: Text) -> list[EncodedRow] | BrokenSample:
        """Return a text with a placeholder for each image, as a document of pre-training."""
        written = self._processor.token * self._processor.n_written
        text = sample.text.replace(IMAGE_PLACE, written)
        [found] = self._tokenizer.tokenize([text], allow_special=True)
        if not (self._tokenizer.special_ids - {self._processor.token_id}).isdisjoint(found):
            return BrokenSample(
                "its text has special tokens, which a text with images cannot have; remove them"
            )
        before, rest = self._processor.form.document(found, len(sample.images))
        ids = np.array([*before, *rest], dtype=np.int64)
        trained = np.ones(len(ids), dtype=bool)
        trained[: len(before)] = False
        return [EncodedRow((EncodedSample(ids, trained),))]

    def _try_expand(
        self, sample: Sample, rows: Sequence[EncodedRow]
    ) -> list[EncodedRow] | BrokenSample:
        images: Sequence[ImageFile] = []
        if isinstance(sample, Conversation | Text):
            images = sample.images
        try:
            if isinstance(sample, Conversation):
                images = self._with_prompt(sample, images)
            parts = self._tokens.expand_samples([row.parts[0] for row in rows], images)
        except BrokenSample as error:
            return error
        return [
            EncodedRow((part,), images=[image.to_json() for image in images[:n]])
            for part, n in parts
        ]

    def _with_prompt(
        self, sample: Conversation, images: Sequence[ImageFile]
    ) -> Sequence[ImageFile]:
        """Return the images with the prompt, if the class reads it together with them. Raise
        `BrokenSample` for several answers, which have several prompts."""
        if not images or not self._processor.form.reads_prompts:
            return images
        roles = [message["role"] for message in sample.messages]
        if roles.count("assistant") != 1 or roles[-1] != "assistant":
            raise BrokenSample(
                "this model reads an image together with one prompt, and the conversation has "
                f"{roles.count('assistant')} answers; write a row for each, at its end"
            )
        prompt = Conversation(sample.messages[:-1], sample.tools, options=sample.options)
        ids = self._chat.encode_prompt(prompt).tolist()
        return self._processor.form.with_prompt(images, ids)


def _has_places(sample: Sample) -> bool:
    return isinstance(sample, Text) and bool(sample.images)


class ImageTokens:
    """Replaces the placeholders in token ids by the tokens of images, as if the processor had
    replaced them in the text."""

    def __init__(self, processor: ImageProcessor, tokenizer: Tokenizer):
        self._processor = processor
        self._tokenizer = tokenizer
        self._bounds = list(tokenizer.special_ids - {processor.token_id})

    def expand_samples(
        self, parts: Sequence[EncodedSample], images: Sequence[ImageFile]
    ) -> list[tuple[EncodedSample, int]]:
        """Return the samples of a row, at least one of which has all of its `images`, with the
        tokens of images, which are not trained, and the number of images of each.

        Raises:
            BrokenSample: if the chat template wrote other placeholders, the text around an image
                cannot be tokenized again, or the processor refuses the size of an image.
        """
        counts = [self._processor.n_placeholders(part.ids) for part in parts]
        for part in parts:
            _reject_image_tokens(self._processor, part.ids)
        if max(counts) > len(images):
            raise BrokenSample(
                f"its text has {max(counts)} placeholders for images, and the row has "
                f"{len(images)} images"
            )
        if max(counts) < len(images):
            raise BrokenSample(
                f"the chat template writes {max(counts)} of its {len(images)} images"
            )
        try:
            return [
                (self._expand_sample(part, images[:n]), n)
                for part, n in zip(parts, counts, strict=True)
            ]
        except BrokenSample:
            raise
        except UserError as error:  # sizes that the processor refuses
            raise BrokenSample(str(error)) from error

    def _expand_sample(self, part: EncodedSample, images: Sequence[ImageFile]) -> EncodedSample:
        form = self._processor.form
        if not images:
            form.check(part.ids, part.trained)
            return part
        places = np.flatnonzero(part.ids == self._processor.token_id)
        if places[-1] == len(part.ids) - 1:
            raise BrokenSample("it ends with an image, which nothing follows")
        ids, sources = self.expand(part.ids, [(image.width, image.height) for image in images])
        wanted = part.trained.copy()
        wanted[places] = False
        trained = np.where(sources >= 0, wanted[sources], False)
        if trained.sum() != wanted.sum():
            raise BrokenSample(
                "the text next to an image is trained, but its tokens depend on the image; with "
                "this model, train on turns of the assistant only"
            )
        kept = form.kept(ids, trained, images)
        ids, trained = ids[kept], trained[kept]
        form.check(ids, trained)
        return part._replace(ids=ids, trained=trained)

    def expand(
        self, ids: np.ndarray, sizes: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids with images of `sizes` (width, height), one for each placeholder, int64
        (n,), and for each of them its place in `ids`; -1 if it is new, int64 (n,).

        Raises:
            BrokenSample: if the text around an image cannot be tokenized again.
        """
        n_written = self._processor.n_written
        places = np.flatnonzero(ids == self._processor.token_id)[::n_written].tolist()
        if self._processor.joins_text:
            spans, new = self._joined(ids, places, sizes)
        else:
            spans = [(place, place + n_written) for place in places]
            new = self._processor.expansions(sizes)
        pieces: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        end = 0
        for (start, stop), inserted in zip(spans, new, strict=True):
            pieces += [ids[end:start], np.array(inserted, np.int64)]
            sources += [np.arange(end, start), np.full(len(inserted), -1)]
            end = stop
        pieces.append(ids[end:])
        sources.append(np.arange(end, len(ids)))
        return np.concatenate(pieces), np.concatenate(sources)

    def _joined(
        self, ids: np.ndarray, places: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Tokenize the text between two special tokens again if it has images; return the spans
        of ids and what replaces them."""
        is_bound = np.isin(ids, self._bounds)
        edges = [0, *(np.flatnonzero(is_bound) + 1).tolist(), len(ids)]
        n_read = 0
        spans: list[tuple[int, int]] = []
        new: list[list[int]] = []
        for start, stop in itertools.pairwise(edges):
            n_images = sum(start <= place < stop for place in places)
            if not n_images:
                continue
            first = max(start - 1, 0)  # a special token may decide how the text after it begins
            last = stop - 1 if is_bound[stop - 1] else stop
            old = ids[first:last].tolist()
            text = self._tokenizer.decode(old)
            [again] = self._tokenizer.tokenize([text], allow_special=True)
            if again != old or text.count(self._processor.token) != n_images:
                raise BrokenSample("the text next to an image has other tokens if read again")
            spans.append((first, last))
            new.append(self._processor.form.read(text, sizes, n_read))
            n_read += n_images
        return spans, new


def _reject_image_tokens(processor: ImageProcessor, ids: np.ndarray) -> None:
    """Raise `BrokenSample` if a rendered text has tokens of images besides placeholders."""
    is_image = np.isin(ids, list(processor.form.image_ids)) & (ids != processor.token_id)
    if is_image.any():
        raise BrokenSample("its text has tokens that stand for parts of images; remove them")


def expand_prompt(
    processor: ImageProcessor,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    images: Sequence[ImageFile],
) -> tuple[np.ndarray, Sequence[ImageFile]]:
    """Return the ids of a rendered prompt with the tokens of its images, int64 (n,), and the
    images, with the prompt if the class reads it together with them.

    Raises:
        UserError: if the chat template did not write a placeholder for each image, or wrote them in
            another form than the model's.
    """
    rendered = np.array(ids, np.int64)
    _reject_image_tokens(processor, rendered)
    n_written = processor.n_placeholders(rendered)
    if n_written != len(images):
        raise UserError(
            f"the prompt has {n_written} placeholders for {len(images)} images ({processor.token})"
        )
    sizes = [(image.width, image.height) for image in images]
    expanded, _ = ImageTokens(processor, tokenizer).expand(rendered, sizes)
    images = processor.form.with_prompt(images, ids)
    expanded = expanded[processor.form.kept(expanded, None, images)]
    processor.form.check(expanded, None)
    return expanded, images


def encode_prompt(
    processor: ImageProcessor,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    images: Sequence[ImageFile],
) -> tuple[list[int], ImageInputs]:
    """Return the result of `expand_prompt`, and the images. Raise its errors."""
    expanded, images = expand_prompt(processor, tokenizer, ids, images)
    decoded = [image.decode() for image in images]
    inputs = ImageReader(processor).inputs([decoded], torch.from_numpy(expanded)[None])
    return expanded.tolist(), inputs
