"""Questions that a model answers in its own words, with text or images, and how the answers are
scored."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.evaluation.image_questions import encode_question
from torchtitan.components.evaluation.scoring import Scorer
from torchtitan.components.evaluation.tasks import Question, standard_error
from torchtitan.components.generation import Engine, Sampling, TextStream, stop_ids
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.rollout.answers import final_answer, numbers_of
from torchtitan.components.rollout.chat import Chat, Reply
from torchtitan.components.rollout.exact_numbers import Number, same_numbers
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, errors_of


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """Fractions of questions with a right answer, with standard errors; None for a single
    question."""

    exact_match: float
    """Fraction of answers that equal a reference, up to letter case, white space between and around
    words, and a period at the end."""
    exact_match_stderr: float | None
    contains: float
    """Fraction of answers that have a reference as whole words, up to letter case and white
    space."""
    contains_stderr: float | None
    number: float | None
    """Fraction of answers with the number of a reference, as by `--rewards number`; None unless all
    questions have a reference with a number."""
    number_stderr: float | None
    questions: int
    cut: int
    """Answers that did not end within the limit of tokens."""


def score_answers(questions: Sequence[Question], replies: Sequence[Reply]) -> AnswerResult:
    """Return the result of open questions, given the model's answers."""
    pairs = list(zip(questions, (reply.content for reply in replies), strict=True))
    exact = [any(map(_same(answer), question.answers)) for question, answer in pairs]
    contains = [any(_has(answer, one) for one in question.answers) for question, answer in pairs]
    references = [[*_numbers(question.answers)] for question in questions]
    numbers = None
    if all(references):
        numbers = [
            any(same_numbers(one, numbers_of(final_answer(answer))) for one in known)
            for known, (_, answer) in zip(references, pairs, strict=True)
        ]
    return AnswerResult(
        exact_match=sum(exact) / len(exact),
        exact_match_stderr=standard_error(exact),
        contains=sum(contains) / len(contains),
        contains_stderr=standard_error(contains),
        number=None if numbers is None else sum(numbers) / len(numbers),
        number_stderr=None if numbers is None else standard_error(numbers),
        questions=len(questions),
        cut=sum(reply.is_cut for reply in replies),
    )


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").rstrip().casefold()


def _same(answer: str) -> Callable[[str], bool]:
    return lambda reference: _plain(reference) == _plain(answer)


def _has(answer: str, reference: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(_plain(reference))}(?!\w)", _plain(answer)))


def _numbers(references: Sequence[str]) -> Iterator[tuple[Number, ...]]:
    return filter(None, (numbers_of(final_answer(reference)) for reference in references))


class AnswerWriter:
    """Lets a model answer questions as messages of a user, with the most probable tokens.

    Args:
        scorer: of the model; its batch size limits the answers at a time.
        folders: of the model, with the tokens that end an answer.
        processor: of images; None: the model reads text only.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        folders: Sequence[Path],
        processor: ImageProcessor | None,
        *,
        max_new_tokens: int,
    ):
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer, template, "assistant")
        self._chat = Chat(template, tokenizer)
        self._processor = processor
        self._max_new_tokens = max_new_tokens
        self._engine = Engine(
            scorer.model,
            sampling=Sampling(),
            stop_ids=stop_ids(tokenizer, *folders) | {*self._chat.stops.ids()},
            max_rows=scorer.batch_size,
            reader=ImageReader(processor) if processor else None,
        )

    def score(self, questions: Sequence[Question], folder: Path) -> AnswerResult:
        """Return the scores of the answers to open questions. Paths of images are relative to
        `folder`. Raise `UserError` for a question that leaves no room for an answer, or whose
        images cannot be read."""
        return score_answers(questions, self.answer(questions, folder))

    def answer(self, questions: Sequence[Question], folder: Path) -> list[Reply]:
        """Return the answer to each question."""
        with self._scorer.progress(len(questions)) as advance:
            return self._engine.run(
                [self._reply(question, folder, advance) for question in questions]
            )

    async def _reply(
        self, question: Question, folder: Path, advance: Callable[[int], object]
    ) -> Reply:
        with errors_of(question.where):
            prompt, images = encode_question(
                question, folder, self._encoder, self._tokenizer, self._processor
            )
            room = self._scorer.max_seq_len - self._max_new_tokens
            if len(prompt) > room:
                raise UserError(
                    f"the question has {len(prompt):,} tokens, and --max_new_tokens "
                    f"{self._max_new_tokens} leaves {max(room, 0):,} of the model's context"
                )
            stream = TextStream(self._tokenizer, prompt, self._chat.stop_texts)
            written = await self._engine.generate(
                prompt,
                max_new_tokens=self._max_new_tokens,
                key=question.where,
                on_token=stream.ends_with,
                images=images,
            )
        advance(1)
        return self._chat.read(prompt, written.ids)
