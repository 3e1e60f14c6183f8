"""Built-in tasks: multiple choice, and the perplexity of a text."""

import dataclasses
import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchtitan.components.data.finetuning.columns import is_filled
from torchtitan.components.data.sources.rows import parse_json
from torchtitan.components.evaluation.scoring import Request, Score, Scorer
from torchtitan.components.generation import start_id
from torchtitan.components.images.rows import COLUMNS as IMAGE_COLUMNS
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, os_errors_as

SUFFIXES = (".jsonl", ".txt", ".md")
"""Suffixes of files to evaluate on."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question, one line of a file: multiple choice, or open, with right answers."""

    query: str
    choices: list[str]
    """Empty: an open question."""
    gold: int
    """Index of the right choice."""
    images: dict[str, Any] = field(default_factory=dict)
    """Columns with images."""
    answers: list[str] = field(default_factory=list)
    """Right answers to an open question."""
    where: str = field(default="", compare=False)
    """File and line, for messages."""


class OpenQuestionScores(Protocol):
    """Scores the model's own answers to open questions; see `written_answers`."""

    def score(self, questions: Sequence[Question], folder: Path) -> Any: ...


class ImageQuestionScores(Protocol):
    """Scores the choices of questions about images; see `image_questions`."""

    def score(self, questions: Sequence[Question], folder: Path) -> list[Score]: ...


@dataclass(frozen=True, slots=True)
class MultipleChoiceResult:
    """Fraction of questions with the highest score for the right choice, and its standard error."""

    accuracy: float
    """Accuracy by log-probability of the choice."""
    accuracy_stderr: float | None
    """None for a single question."""
    accuracy_norm: float
    """Accuracy by log-probability of the choice divided by its length in bytes of UTF-8."""
    accuracy_norm_stderr: float | None
    centered_accuracy: float | None
    """`centered` accuracy; None if no question has two choices."""
    questions: int
    truncated: int
    """Questions truncated at the beginning to fit into the model's context."""


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Return the first `limit` questions (None: all) of a file with one JSON object per line:
    `query`, `choices`, `gold`, or `query`, `answer`. Raise `UserError` with the line number for an
    invalid line, or one of another kind than the first."""
    with os_errors_as(f"'{path}' cannot be read"):
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    questions = [_parse(line, f"'{path}' line {number}") for number, line in numbered[:limit]]
    if not questions:
        raise UserError(f"'{path}' has no questions")
    for question in questions:
        if bool(question.choices) != bool(questions[0].choices):
            raise UserError(
                f"{question.where} and the first question differ in kind: one has choices, the "
                "other an answer; divide the file"
            )
    return questions


def multiple_choice(
    scorer: Scorer, tokenizer: Tokenizer, questions: Sequence[Question]
) -> MultipleChoiceResult:
    """Score every choice of every question. Query and choice are separated by a space unless there
    is whitespace already. The first of equal scores counts."""
    requests = []
    for question in questions:
        pairs = [(question.query, _continuation(question, choice)) for choice in question.choices]
        requests += encode_pairs(tokenizer, pairs)
    return rated(questions, scorer.score(requests))


def rated(questions: Sequence[Question], of_choices: Sequence[Score]) -> MultipleChoiceResult:
    """Return the result of questions, given the scores of all of their choices in order."""
    scores = iter(of_choices)
    hits = []
    norm_hits = []
    truncated = 0
    for question in questions:
        choice_scores = [next(scores) for _ in question.choices]
        logprobs = [score.logprob for score in choice_scores]
        per_byte = [
            logprob / len(c.encode()) for logprob, c in zip(logprobs, question.choices, strict=True)
        ]
        hits.append(logprobs.index(max(logprobs)) == question.gold)
        norm_hits.append(per_byte.index(max(per_byte)) == question.gold)
        truncated += any(score.truncated for score in choice_scores)
    chance = sum(1 / len(question.choices) for question in questions) / len(questions)
    return MultipleChoiceResult(
        accuracy=sum(hits) / len(hits),
        accuracy_stderr=standard_error(hits),
        accuracy_norm=sum(norm_hits) / len(norm_hits),
        accuracy_norm_stderr=standard_error(norm_hits),
        centered_accuracy=centered(sum(hits) / len(hits), chance),
        questions=len(questions),
        truncated=truncated,
    )


def centered(accuracy: float, chance: float) -> float | None:
    """Return 0 for an accuracy at chance and 1 for a perfect one, as in DCLM's CORE
    (arXiv:2406.11794); None if chance alone is perfect."""
    return None if chance == 1 else (accuracy - chance) / (1 - chance)


def check_harness(names: Sequence[str], include_path: Path | None, option: str) -> None:
    """Raise `UserError` if lm-eval, which has the tasks `names`, is not installed, or
    `include_path`, which `option` sets, is not a folder."""
    if include_path is not None and not include_path.is_dir():
        fault = "is not a folder" if include_path.exists() else "does not exist"
        raise UserError(
            f"{option}: {include_path} {fault}; name the folder with the tasks' YAML files"
        )
    for name in names:
        _reject_file(name, option)
    if names and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{', '.join(names)} is not a .jsonl, .txt or .md file, so it must be an lm-eval task, "
            "but lm-eval is not installed (pip install 'torchtitan[eval]')"
        )


def _reject_file(name: str, option: str) -> None:
    """Raise `UserError` for the name of a task that is a file, or a folder."""
    path = Path(name)
    if not path.exists() or (path.is_dir() and path.name == name):
        return  # a task may have the name of a folder
    if path.suffix in (".yaml", ".yml"):
        raise UserError(
            f"'{name}' is a file, and a task is named by the `task` in it; add {option} "
            f"{path.parent} and name that"
        )
    kind = "folder" if path.is_dir() else "file"
    if path.suffix in SUFFIXES:  # a run names its files in an option of their own
        files = option.replace("include_path", "files")
        raise UserError(f"'{name}' is a file, and no task of lm-eval; name it with {files} {name}")
    raise UserError(
        f"'{name}' is a {kind}, and no task: questions are in .jsonl, texts in .txt and .md, and "
        f"lm-eval's tasks in YAML files of the folder {option} DIR"
    )


def mean_centered(
    results: Mapping[str, Mapping[str, Any]], members: Collection[str] = ()
) -> dict[str, float]:
    """Return the mean of the centered accuracies of tasks, `centered_accuracy`, and the number of
    tasks with a centered accuracy, `centered_tasks`; empty if no task has one. `members` of groups
    do not count, since their groups do."""
    tops = (numbers for name, numbers in results.items() if name not in members)
    known = [value for top in tops if (value := top.get("centered_accuracy")) is not None]
    if not known:
        return {}
    return {"centered_accuracy": sum(known) / len(known), "centered_tasks": len(known)}


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """Encode (context, continuation) pairs like lm-eval, for comparable scores. Raise `UserError`
    for a continuation without tokens.

    Whitespace at the end of the context moves to the continuation. If the context alone has n
    tokens, the continuation is the joint encoding after its first n tokens. An empty context is BOS
    (or EOS, without BOS). BOS is added as configured by the tokenizer.
    """
    moved = [
        (context.rstrip(), context[len(context.rstrip()) :] + continuation)
        for context, continuation in pairs
    ]
    joint = tokenizer.encode_batch(
        [context + continuation for context, continuation in moved], add_eos=False
    )
    alone = tokenizer.encode_batch([context for context, _ in moved], add_eos=False)
    requests = []
    for (context, continuation), joint_ids, context_ids in zip(moved, joint, alone, strict=True):
        if not context:
            context_ids = [start_id(tokenizer)]
            joint_ids = joint_ids if joint_ids[:1] == context_ids else context_ids + joint_ids
        if len(joint_ids) <= len(context_ids):
            raise UserError(
                f"{continuation!r} adds no token to {context!r}, so it has no probability"
            )
        requests.append(Request(context_ids, joint_ids[len(context_ids) :]))
    return requests


def _parse(line: str, where: str) -> Question:
    try:
        content = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{where} must be an object with query, choices and gold, not {type(content).__name__}"
        )
    if "choices" not in content and "answer" in content:
        return _parse_open(content, where)
    if missing := [key for key in ("query", "choices", "gold") if key not in content]:
        raise UserError(
            f"{where} has no {' and no '.join(missing)}, but {', '.join(content) or 'nothing'}; a "
            "question has query, choices and gold, or query and answer"
        )
    query = content["query"]
    choices = content["choices"]
    gold = content["gold"]
    well_formed = isinstance(query, str) and isinstance(choices, list) and type(gold) is int
    if not (
        well_formed
        and choices
        and all(isinstance(choice, str) and choice.strip() for choice in choices)
    ):
        raise UserError(
            f"{where}: query must be text, choices a list of nonempty texts, and gold a number"
        )
    if not 0 <= gold < len(choices):
        raise UserError(
            f"{where}: gold is {gold}, but there are {len(choices)} choices, counted from 0"
        )
    return Question(query, choices, gold, _images_in(content), where=where)


def _parse_open(content: Mapping[str, object], where: str) -> Question:
    query, answer = content.get("query"), content["answer"]
    answers = answer if isinstance(answer, list) else [answer]
    texts = [str(one) for one in answers if type(one) is str or _is_number(one)]
    if not isinstance(query, str) or len(texts) < len(answers) or not all(map(str.strip, texts)):
        raise UserError(
            f"{where}: query must be text, and answer a nonempty text, a finite number, or a list "
            "of them"
        )
    if not texts:
        raise UserError(f"{where}: answer is an empty list")
    return Question(query, [], 0, _images_in(content), texts, where)


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _images_in(content: Mapping[str, object]) -> dict[str, object]:
    return {
        column: value
        for column, value in content.items()
        if column in IMAGE_COLUMNS and is_filled(value)
    }


def _continuation(question: Question, choice: str) -> str:
    separated = not question.query or question.query[-1].isspace() or choice[0].isspace()
    return choice if separated else f" {choice}"


def standard_error(hits: Sequence[bool]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    mean = sum(hits) / len(hits)
    return math.sqrt(mean * (1 - mean) / (len(hits) - 1)) if len(hits) > 1 else None


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Perplexity of one text."""

    perplexity: float
    """Exponential of the mean negative log-likelihood per token."""
    bits_per_byte: float
    """Negative log-likelihood of the text in bits, per byte of UTF-8; comparable between
    tokenizers."""
    loss: float
    """Mean negative log-likelihood per token, in nats."""
    tokens: int
    bytes: int


def text_perplexity(scorer: Scorer, tokenizer: Tokenizer, text: str) -> PerplexityResult:
    """Score every token of `text` once, with at least half of the model's context before it if
    possible. BOS (or EOS, without BOS) always precedes the text, to predict the first token; it is
    not scored. Raise `UserError` for an empty text."""
    if not text:
        raise UserError("the text is empty")
    start = start_id(tokenizer)
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    scores = scorer.score(list(windows([start, *ids], scorer.max_seq_len)))
    nats = -sum(score.logprob for score in scores)
    try:
        perplexity = math.exp(nats / len(ids))
    except OverflowError:
        perplexity = math.inf
    return PerplexityResult(
        perplexity=perplexity,
        bits_per_byte=nats / math.log(2) / len(text.encode()),
        loss=nats / len(ids),
        tokens=len(ids),
        bytes=len(text.encode()),
    )


def windows(ids: list[int], size: int) -> Iterator[Request]:
    """Yield requests that score all `ids` except the first once. The first window predicts `size`
    tokens, each later one half of `size`, given the half before them."""
    end = min(size + 1, len(ids))
    yield Request(ids[:1], ids[1:end])
    stride = max(1, size // 2)
    while end < len(ids):
        begin, end = end, min(end + stride, len(ids))
        yield Request(ids[max(0, end - 1 - size) : begin], ids[begin:end])


def evaluate_file(
    path: Path,
    scorer: Scorer,
    tokenizer: Tokenizer,
    limit: int | None = None,
    *,
    images: ImageQuestionScores | None = None,
    answers: OpenQuestionScores | None = None,
) -> dict[str, object]:
    """Evaluate on a file with one of `SUFFIXES`: return the fields of a `MultipleChoiceResult` or
    an `AnswerResult` of at most `limit` questions, or of a `PerplexityResult`. Raise `UserError` if
    the file is unreadable or empty.

    Args:
        images: scores all multiple-choice questions of a file in which any has images.
        answers: scores open questions.
    """
    if path.suffix != ".jsonl":
        return dataclasses.asdict(text_perplexity(scorer, tokenizer, read_text(path)))
    questions = read_questions(path, limit)
    folder = path.absolute().parent
    if answers and not questions[0].choices:
        return dataclasses.asdict(answers.score(questions, folder))
    if images and any(question.images for question in questions):
        result = rated(questions, images.score(questions, folder))
    else:
        reject_others(questions)
        result = multiple_choice(scorer, tokenizer, questions)
    return dataclasses.asdict(result)


def reject_others(questions: Sequence[Question]) -> None:
    """Raise `UserError` if a question has images, or no choices."""
    for question in questions:
        if not question.choices:
            raise UserError(
                f"{question.where} has no choices, and only `torchtitan eval` lets a model write "
                "answers"
            )
        if question.images:
            raise UserError(
                f"{question.where} has images, which only `torchtitan eval` shows to a model"
            )


def read_text(path: Path) -> str:
    """Return the text of a file; raise `UserError` if it cannot be read or is empty."""
    with os_errors_as(f"'{path}' cannot be read as UTF-8 text"):
        text = path.read_text(encoding="utf-8")
    if not text:
        raise UserError(f"'{path}' is empty")
    return text
