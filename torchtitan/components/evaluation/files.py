"""Evaluation on a file: questions with choices (.jsonl), or a text (.txt, .md)."""

import dataclasses
from pathlib import Path
from typing import Any

from torchtitan.components.evaluation.multiple_choice import multiple_choice, read_questions
from torchtitan.components.evaluation.perplexity import text_perplexity
from torchtitan.components.evaluation.scoring import Progress, Scorer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

SUFFIXES = (".jsonl", ".txt", ".md")
"""Suffixes of files to evaluate on."""


def evaluate_file(
    path: Path, scorer: Scorer, tokenizer: Tokenizer, limit: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the numbers of a file: of a `MultipleChoiceResult`, or of a `PerplexityResult`.

    Args:
        path: has one of `SUFFIXES`.
        scorer: over the model.
        tokenizer: the model's.
        limit: most questions; None: all.
        progress: told of scored requests.

    Raises:
        UserError: if the file cannot be read, or has nothing to score.
    """
    if path.suffix == ".jsonl":
        return dataclasses.asdict(multiple_choice(scorer, tokenizer, read_questions(path, limit), progress))
    return dataclasses.asdict(text_perplexity(scorer, tokenizer, read_text(path), progress))


def read_text(path: Path) -> str:
    """Return the text of a file; raises `UserError` if it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read as a text in UTF-8: {error}") from error
    if not text:
        raise UserError(f"'{path}' is empty: there is nothing to score")
    return text
