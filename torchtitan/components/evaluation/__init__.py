"""Evaluation of a model: multiple choice and the perplexity of a text, and an adapter to lm-eval."""

from torchtitan.components.evaluation.multiple_choice import (
    MultipleChoiceResult,
    Question,
    multiple_choice,
    read_questions,
)
from torchtitan.components.evaluation.perplexity import PerplexityResult, text_perplexity
from torchtitan.components.evaluation.scoring import Progress, Request, Score, Scorer

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
