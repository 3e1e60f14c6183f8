"""Model evaluation: multiple choice, perplexity of a text, and an adapter for lm-eval."""

from torchtitan.components.evaluation.scoring import Request as Request
from torchtitan.components.evaluation.scoring import Score as Score
from torchtitan.components.evaluation.scoring import Scorer as Scorer
from torchtitan.components.evaluation.tasks import MultipleChoiceResult as MultipleChoiceResult
from torchtitan.components.evaluation.tasks import PerplexityResult as PerplexityResult
from torchtitan.components.evaluation.tasks import Question as Question
from torchtitan.components.evaluation.tasks import multiple_choice as multiple_choice
from torchtitan.components.evaluation.tasks import read_questions as read_questions
from torchtitan.components.evaluation.tasks import text_perplexity as text_perplexity
