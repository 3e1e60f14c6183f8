"""How well a model predicts a text: perplexity per token, and bits per byte, which tokenizers can be compared by."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.components.evaluation.scoring import Progress, Request, Scorer
from torchtitan.components.generation.prompts import start_id
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """Of one text."""

    perplexity: float
    """Exponential of the mean negative log-likelihood per token."""

    bits_per_byte: float
    """Negative log-likelihood of the text in bits, divided by its bytes of UTF-8."""

    loss: float
    """Mean negative log-likelihood per token, in nats."""

    tokens: int

    bytes: int


def text_perplexity(
    scorer: Scorer, tokenizer: Tokenizer, text: str, progress: Progress | None = None
) -> PerplexityResult:
    """Score every token of `text` once, with at least half of the model's context before it, where there is as much.

    In front of the text stands BOS (or EOS, where there is no BOS), whatever the tokenizer's configuration says: it is
    what the first token is predicted from, and is not scored itself.

    Raises:
        UserError: for an empty text.
    """
    if not text:
        raise UserError("the text is empty: there is nothing to score")
    start = start_id(tokenizer)
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    scores = scorer.score(list(windows([start, *ids], scorer.max_seq_len)), progress)
    nats = -sum(score.logprob for score in scores)
    return PerplexityResult(
        perplexity=_exp(nats / len(ids)),
        bits_per_byte=nats / math.log(2) / len(text.encode()),
        loss=nats / len(ids),
        tokens=len(ids),
        bytes=len(text.encode()),
    )


def windows(ids: list[int], size: int) -> Iterator[Request]:
    """Requests that score all but the first of `ids` once, each of at most `size` predictions.

    The first window predicts `size` tokens; each later one half as many, from the half before them on.
    """
    end = min(size + 1, len(ids))
    yield Request(ids[:1], ids[1:end])
    stride = max(1, size // 2)
    while end < len(ids):
        begin, end = end, min(end + stride, len(ids))
        yield Request(ids[max(0, end - 1 - size) : begin], ids[begin:end])


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
