"""`ImageForm`: how the texts of a model have their images."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from torchtitan.components.data.pretraining.token_cache import document_wrapping
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.opened import Opened, Samples, Size
from torchtitan.tools.errors import UserError


class Expansion(NamedTuple):
    """What replaces the placeholder of each image of a sample."""

    texts: list[str]
    """Empty if the text around an image changes, too."""
    ids: list[np.ndarray]
    """Token ids of each text by itself, int32 (n,)."""


class ImageForm(Protocol):
    """How the texts of a model have their images, found by a trial of its processor.

    A chat template writes `n_written` placeholders for an image, which become the ids of `expand`.

    Args:
        opened: processor of transformers.
        token: placeholder.

    Raises:
        UserError: if the placeholder is not one token.
    """

    opened: Opened
    token: str
    """Text of the placeholder."""
    token_id: int
    """Id of the placeholder."""
    n_written: int
    """Placeholders for an image: one, or all tokens of an image."""
    image_ids: frozenset[int]
    """Ids of the tokens of images, which answers cannot contain."""
    joins_text: bool
    """True if the text in the place of an image begins or ends with ordinary text, such as the line
    breaks of Gemma 3, or if the processor changes the text next to an image. Token ids then
    depend on the text around the image: `read` the text, instead of putting the ids of `expand`
    into token ids."""
    identity: Sequence[object]
    """What decides token ids besides the files that describe the processor."""

    names: ClassVar[Collection[str]] = ()
    """Classes of processors that have this form."""
    reads_prompts: ClassVar[bool] = False
    """True if the class reads the prompt together with an image, see `with_prompt`."""

    @classmethod
    def find(cls, opened: Opened) -> Self | None:
        """Return the form of a processor; None if it has another one. Raise `UserError` if it has
        this form, and cannot be used."""
        return cls(opened, opened.token) if opened.name in cls.names else None

    def __init__(self, opened: Opened, token: str):
        token_id = opened.tokenizer.id_of(token)
        if token_id is None:
            raise UserError(
                f"{opened.name} writes {token!r} for an image, which is not one token of the "
                "tokenizer; use the tokenizer of the published model"
            )
        self.opened = opened
        self.token = token
        self.token_id = token_id
        self.n_written = 1
        self.image_ids = frozenset({token_id})
        self.joins_text = False
        self.identity = ()

    @abstractmethod
    def expand(self, sizes: Sequence[Size]) -> Expansion:
        """Return what replaces the placeholders of images of `sizes`. Raise `UserError` for sizes
        that the processor refuses."""

    @abstractmethod
    def inputs(self, images: Samples) -> dict[str, Tensor]:
        """Return the arguments of the class for the images of each sample of a batch, at least one
        of which has images."""

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        """Return the images of a sample with its prompt, if the class reads it together with them.

        Args:
            ids: token ids of the prompt with placeholders.

        Raises:
            BrokenSample: if the class cannot read the prompt.
        """
        return images

    def read(self, text: str, sizes: Sequence[Size], first: int) -> list[int]:
        """Return the token ids of a part of a sample with images of `sizes`. The ids of the part's
        images, from the `first` on, replace their placeholders. Raise `UserError` for sizes that
        the processor refuses."""
        before, *others = text.split(self.token)
        texts = self.expand(sizes).texts[first : first + len(others)]
        whole = before + "".join(new + other for new, other in zip(texts, others, strict=True))
        [ids] = self.opened.tokenizer.tokenize([whole], allow_special=True)
        return ids

    def document(self, ids: list[int], n_images: int) -> tuple[list[int], list[int]]:
        """Return a text with `n_images` placeholders as a document of pre-training: the ids that
        are not trained at its beginning, and the others."""
        before, after = document_wrapping(self.opened.tokenizer)
        return before, [*ids, *after]

    def n_placeholders(self, ids: np.ndarray) -> int:
        """Return the number of images that the placeholders in a text's `ids` (L,) stand for. Raise
        `UserError` if a template wrote another number for an image than the class reads."""
        return int((ids == self.token_id).sum())

    def kept(
        self, ids: np.ndarray, trained: np.ndarray | None, images: Sequence[ImageFile]
    ) -> np.ndarray:
        """Return the places of a text's `ids` (L,) that become tokens of a sample. The class may
        read the other ids together with the images.

        Args:
            trained: True where an answer is trained; None: the text has no answer.
            images: the images, with the prompt if the class reads it together with them.

        Raises:
            BrokenSample: if the class cannot read the text.
        """
        return np.arange(len(ids))

    def check(self, ids: np.ndarray, trained: np.ndarray | None) -> None:
        """Raise `BrokenSample` unless a text's `ids` (L,) with the tokens of images have this form,
        with an answer where it is trained; None: without an answer."""

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        """Return the types of tokens (..., L): 1 for tokens of images, and 0 for others."""
        return np.isin(ids, list(self.image_ids)).astype(np.int64)

    def more_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the further arguments of the class for types of tokens (..., L), by name."""
        return {}


def repeated(text: str, ids: Sequence[int], n_images: int) -> Expansion:
    """Return the expansion of images with the same tokens."""
    return Expansion([text] * n_images, [np.array(ids, dtype=np.int32)] * n_images)
