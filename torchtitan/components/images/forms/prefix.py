"""The form of texts of processors that divide a text into a prompt and its answer, such as
PaliGemma's."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.images.forms.plain import PlainForm
from torchtitan.components.images.opened import Opened, noise
from torchtitan.protocols.images import TOKEN_TYPES


@dataclass(frozen=True)
class PrefixText:
    """A text of images, BOS, a prompt of one line, and the answer. Tokens before the answer see
    each other both ways."""

    image_id: int
    begin_id: int
    end_id: int
    """The line break that ends a prompt."""
    eos_id: int
    """EOS, which ends an answer."""

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        """Return 0 for the tokens of images and prompts, and 1 for those of answers and padding,
        int64 (..., L); rows may have several texts."""
        places = np.arange(ids.shape[-1])
        starts = np.where(ids == self.begin_id, places, -1)
        starts = np.maximum.accumulate(starts, axis=-1)
        is_end = ids == self.end_id
        n_ends = is_end.cumsum(-1)
        at_start = np.take_along_axis(n_ends, starts.clip(min=0), -1)
        has_prompt = n_ends - is_end > at_start
        return ((starts >= 0) & has_prompt & (ids != self.image_id)).astype(np.int64)

    def check(self, ids: np.ndarray, trained: np.ndarray | None) -> None:
        """Raise `BrokenSample` unless `ids` (L,) have this form, with an answer where it is
        trained; None: without an answer."""
        begins = np.flatnonzero(ids == self.begin_id)
        n_images = int((ids == self.image_id).sum())
        if begins.tolist() != [n_images] or (ids[:n_images] != self.image_id).any():
            raise BrokenSample(
                "this model reads its images, BOS, one prompt and its answer; use a chat template "
                "that writes them in this order"
            )
        ends = np.flatnonzero(ids == self.end_id)
        answer = len(ids) if trained is None else int(np.argmax(trained))
        if not len(ends) or ends[0] != answer - 1:
            raise BrokenSample(
                "this model reads a prompt of one line, and is trained on the answer after it; "
                "write the prompt without line breaks, and train on the answer only"
            )
        if trained is not None and (np.diff(trained[answer:].astype(np.int8)) > 0).any():
            raise BrokenSample(
                "this model reads one prompt and its answer, and the text has a later answer; "
                "write a row for each question"
            )


class PrefixForm(PlainForm):
    """The processor divides texts, as a trial shows."""

    divides_texts = True
    text: PrefixText

    @classmethod
    def find(cls, opened: Opened) -> Self | None:
        text = _find_text(opened)
        if text is None:
            return None
        form = cls(opened, opened.token)
        form.text = text
        return form if form.try_images() else None

    def document(self, ids: list[int], n_images: int) -> tuple[list[int], list[int]]:
        before = [*ids[:n_images], self.text.begin_id, self.text.end_id]  # an empty prompt
        return before, [*ids[n_images:], self.text.eos_id]

    def check(self, ids: np.ndarray, trained: np.ndarray | None) -> None:
        self.text.check(ids, trained)

    def more_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return super().more_types(ids) | {TOKEN_TYPES: self.text.token_types(ids)}


def _find_text(opened: Opened) -> PrefixText | None:
    """Return how a processor divides a text into a prompt and its answer; None if it does not, or
    in another way."""
    tokenizer, token = opened.tokenizer, opened.token
    try:
        outputs = opened.processor(
            images=[noise()[:1]],
            text=[f"{token}q"],
            suffix=["a"],
            text_kwargs={"return_tensors": None},
        )
    except Exception:  # processors raise various types
        return None
    if not {"labels", "token_type_ids"} <= outputs.keys():
        return None
    [ids], [types] = outputs["input_ids"], outputs["token_type_ids"]
    texts = [token, "q", "a", "\n"]
    image_ids, q_ids, a_ids, line_ids = tokenizer.tokenize(texts, allow_special=True)
    begin_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
    if begin_id is None or eos_id is None or len(image_ids) != 1 or len(line_ids) != 1:
        return None
    n_images = list(ids).count(image_ids[0])
    prompt = [*image_ids * n_images, begin_id, *q_ids, *line_ids]
    answer = [*a_ids, eos_id]
    if list(ids) != prompt + answer or list(types) != [0] * len(prompt) + [1] * len(answer):
        return None
    return PrefixText(image_ids[0], begin_id, line_ids[0], eos_id)
