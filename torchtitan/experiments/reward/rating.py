"""Rating of answers by a reward model."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtitan.components.chat_template import resolve_chat_template
from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.data.finetuning.conversation import Conversation, Prompt
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.row_formats import find_format
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.images.encoder import ImageTokens
from torchtitan.components.images.files import GivenImages, ImageFile
from torchtitan.components.images.loader import ImageBatches
from torchtitan.components.images.rows import reads_images
from torchtitan.components.images.rows_loader import processor_of
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model, spec_of
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError, errors_of

Images = Sequence[ImageFile]


def check_reward_model(folder: str, *, with_images: bool = False) -> None:
    """Raise `UserError` unless `folder` has a reward model, which reads images if `with_images`,
    without reading its weights."""
    model = spec_of(folder, family=_family(with_images)).model
    if not model.scores:
        raise UserError(f"{folder} is no reward model; train one with --module reward")
    if with_images:
        with errors_of(folder):
            dataclasses.replace(model, reads_images=True).validate()  # type: ignore[call-arg]


def _family(with_images: bool) -> ModuleType | None:
    """Return the family whose models read images: the classes of transformers."""
    if not with_images:
        return None
    from torchtitan.models import transformers  # takes seconds, and belongs to an extra

    return transformers


class RewardModel:
    """The reward model in a folder, as a function of prompts, completions and rows: it rates the
    completions as the answers to the rows' prompts, with its own tokenizer and chat template.

    Args:
        batch_size: answers of similar length that are computed at a time.
        with_images: whether prompts have images, which the model reads by its own processor.

    Raises:
        UserError: the folder has no reward model, or none that reads images.
    """

    def __init__(self, folder: str, batch_size: int = 16, *, with_images: bool = False):
        check_reward_model(folder, with_images=with_images)
        self._folder = folder
        self._batch_size = batch_size
        self._device = device_type()
        loaded = load_model(folder, device=self._device, family=_family(with_images))
        self._model = loaded.model
        self._tokenizer = PretrainedTokenizer.Config().build(path=loaded.tokenizer_path)
        self._template = resolve_chat_template("", [loaded.tokenizer_path], self._tokenizer)
        self._processor = processor_of(self._tokenizer) if with_images else None

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, object]],
        images: Sequence[Images] = (),
    ) -> list[float | None]:
        """Return the rewards; None for a completion that spells tokens of images, which the model
        cannot read.

        Args:
            images: the images of each prompt.

        Raises:
            UserError: the model cannot read the images of a prompt, or the row has others.
        """
        given = images or [()] * len(rows)
        found = map(self._encode, completions, rows, given)
        texts = {number: text for number, text in enumerate(found) if text is not None}
        order = sorted(texts, key=lambda number: len(texts[number].ids))
        rewards: list[float | None] = [None] * len(rows)
        for start in range(0, len(order), self._batch_size):
            numbers = order[start : start + self._batch_size]
            scores = self._scores([texts[number] for number in numbers])
            for number, reward in zip(numbers, scores, strict=True):
                rewards[number] = reward
        return rewards

    def _encode(
        self, completion: str, row: Mapping[str, object], images: Images
    ) -> EncodedRow | None:
        """Return the conversation, and another token, so that the model sees the last one."""
        prompt = self._prompt(row, images)
        messages = [*prompt.messages, {"role": "assistant", "content": completion}]
        text = self._template.render(messages, tools=prompt.tools, add_generation_prompt=False)
        [own, ids] = self._tokenizer.tokenize([completion, text], allow_special=True)
        part = EncodedSample(np.array(ids), np.zeros(len(ids), bool))
        if self._processor:
            if not {*self._processor.form.image_ids, self._processor.token_id}.isdisjoint(own):
                return None
            with errors_of(f"reward_model={self._folder}"):
                if images and self._processor.form.reads_prompts:
                    asked = self._template.render(
                        prompt.messages, tools=prompt.tools, add_generation_prompt=True
                    )
                    [before] = self._tokenizer.tokenize([asked], allow_special=True)
                    images = self._processor.form.with_prompt(images, before)
                    part.trained[len(before) :] = True
                tokens = ImageTokens(self._processor, self._tokenizer)
                [(part, _)] = tokens.expand_samples([part], images)
        part = EncodedSample(np.append(part.ids, 0), np.append(part.trained, False))
        return EncodedRow((part,), images=[image.to_json() for image in images])

    def _prompt(self, row: Mapping[str, object], images: Images) -> Conversation:
        form = find_format(list(row), "auto", {}, "prompt")
        if self._processor:
            form = reads_images(form, GivenImages(images))
        with errors_of(f"reward_model={self._folder}"):
            sample = form.convert(dict(row))
        assert isinstance(sample, Prompt) and isinstance(sample.prompt, Conversation)
        return sample.prompt

    def _scores(self, rows: Sequence[EncodedRow]) -> list[float]:
        """Return the score of the last token of each conversation. Tokens after it do not change
        it."""
        make_batch = ImageBatches(self._processor) if self._processor else _text_rows
        batch = make_batch([[row] for row in rows], 0)
        moved = {name: value.to(self._device) for name, value in batch.items()}
        scores_BL = self._model(
            moved["input"], moved.get("attention"), head=F.linear, **images_in(moved)
        )[..., 0]
        last = torch.tensor([[len(row.ids) - 2] for row in rows], device=self._device)
        found: list[float] = scores_BL.gather(1, last).flatten().tolist()
        return found


def _text_rows(windows: Windows, seq_len: int) -> Batch:
    """Return rows of one text each, with padding up to the longest one."""
    texts = [torch.from_numpy(sample.ids[:-1]) for window in windows for sample in window]
    return {"input": pad_sequence(texts, batch_first=True)}
