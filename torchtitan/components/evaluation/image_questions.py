"""Multiple-choice questions about images: each choice is an answer in the model's chat template."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.base import images_in
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import BrokenSample, Prompt
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.row_formats import find_format
from torchtitan.components.data.sources.source import AUTO
from torchtitan.components.evaluation.scoring import Score, Scorer
from torchtitan.components.evaluation.tasks import Question
from torchtitan.components.generation.forward import NOT_FINITE_HINT, evaluating
from torchtitan.components.images.encoder import expand_prompt
from torchtitan.components.images.files import ImageFile, ImageOpener
from torchtitan.components.images.loader import ImageBatches
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.rows import reads_images
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, errors_of


def encode_question(
    question: Question,
    folder: Path,
    chat: ChatEncoder,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
) -> tuple[list[int], Sequence[ImageFile]]:
    """Return the tokens of a question as a user's message, and its images, whose paths are relative
    to `folder`; no images without a processor. Raise `UserError` if they cannot be read."""
    row = {"query": question.query, **question.images}
    form = find_format(list(row), AUTO, {}, "prompt")
    try:
        sample = (reads_images(form, ImageOpener(folder)) if processor else form).convert(row)
        assert isinstance(sample, Prompt)
        ids = chat.encode_prompt(sample.prompt).tolist()
        if processor is None:
            return ids, []
        expanded, images = expand_prompt(processor, tokenizer, ids, sample.prompt.images)
        return expanded.tolist(), images
    except BrokenSample as error:
        raise UserError(str(error)) from error


class ImageQuestionScorer:
    """Scores the choices of questions about images by a class of transformers.

    Args:
        scorer: of the model, for texts.
        template: the model's chat template.
        processor: the model's.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        processor: ImageProcessor,
    ):
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._chat = ChatEncoder(tokenizer, template, "assistant")
        self._processor = processor
        self._make_batch = ImageBatches(processor)
        self._opening = _opening_of(template, tokenizer)

    @torch.no_grad()
    def score(self, questions: Sequence[Question], folder: Path) -> list[Score]:
        """Return the score of each choice of each question, in order. Paths of images are relative
        to `folder`. Raise `UserError` with the line for an image that cannot be read, or a question
        that does not fit into the model's context."""
        rows: list[EncodedRow] = []
        for question in questions:
            with errors_of(question.where):
                rows += self._rows_of(question, folder)
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
        size = self._scorer.batch_size
        scores: dict[int, Score] = {}
        with evaluating(self._scorer.model), self._scorer.progress(len(order)) as advance:
            for begin in range(0, len(order), size):
                numbers = order[begin : begin + size]
                values = self._log_probs([rows[number] for number in numbers])
                scores |= {
                    number: Score(logprob=value, is_greedy=False, truncated=False)
                    for number, value in zip(numbers, values, strict=True)
                }
                advance(len(numbers))
        return [scores[number] for number in range(len(rows))]

    def _rows_of(self, question: Question, folder: Path) -> list[EncodedRow]:
        """Return the prompt with each choice."""
        prompt, images = encode_question(
            question, folder, self._chat, self._tokenizer, self._processor
        )
        prompt = [*prompt, *self._opening]
        rows = []
        for answer in self._tokenizer.tokenize(question.choices, allow_special=False):
            tokens = np.concatenate((prompt, np.array(answer, np.int64)))
            if len(tokens) > self._scorer.max_seq_len + 1:
                raise UserError(
                    f"question and choice have {len(tokens):,} tokens, and the model's context "
                    f"{self._scorer.max_seq_len:,}; a question with images is not cut"
                )
            trained = np.arange(len(tokens)) >= len(prompt)
            rows.append(
                EncodedRow(
                    (EncodedSample(tokens, trained),), images=[image.to_json() for image in images]
                )
            )
        return rows

    def _log_probs(self, rows: Sequence[EncodedRow]) -> list[float]:
        """Return the log-probability of the trained tokens of each row."""
        model = self._scorer.model
        device = next(model.parameters()).device
        batch = self._make_batch([[row] for row in rows], self._scorer.max_seq_len)
        moved = {name: value.to(device) for name, value in batch.items()}
        values_BL = model(
            moved["input"],
            moved.get("attention"),
            head=token_log_probs,
            labels_BL=moved["labels"],
            **images_in(moved),
        )
        if not values_BL.isfinite().all():
            raise UserError(
                f"the model's log-probabilities are not finite (NaN or infinite); {NOT_FINITE_HINT}"
            )
        sums: list[float] = values_BL.sum(dim=1, dtype=torch.float64).tolist()
        return sums


def _opening_of(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens between a prompt and the text of its answer, such as the BOS that
    begins Florence-2's."""
    asked = [{"role": "user", "content": "question"}]
    answered = [*asked, {"role": "assistant", "content": "answer"}]
    try:
        prompt = template.render(asked, add_generation_prompt=True)
        whole = template.render(answered, add_generation_prompt=False)
    except UserError:  # it does not accept this conversation
        return []
    opening, found, _ = whole.removeprefix(prompt).partition("answer")
    if not (whole.startswith(prompt) and found):
        return []
    [ids] = tokenizer.tokenize([opening], allow_special=True)
    return ids if tokenizer.special_ids.issuperset(ids) else []
