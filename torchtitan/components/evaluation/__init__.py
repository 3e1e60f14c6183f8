"""Evaluation of a model: multiple choice and the perplexity of a text, and an adapter to lm-eval."""

from torchtitan.components.evaluation.scoring import Progress, Request, Score, Scorer
from torchtitan.components.evaluation.tasks import (
    MultipleChoiceResult,
    PerplexityResult,
    Question,
    multiple_choice,
    read_questions,
    text_perplexity,
)

__all__ = [
    "MultipleChoiceResult",
    "PerplexityResult",
    "Progress",
    "Question",
    "Request",
    "Score",
    "Scorer",
    "multiple_choice",
    "read_questions",
    "text_perplexity",
]
