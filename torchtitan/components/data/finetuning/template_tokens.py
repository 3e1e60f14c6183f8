"""Whether the special tokens that a chat template writes are in the vocabulary."""

import re

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|<(?:start|end)_of_turn>")
"""What is never ordinary text, whoever wrote the template: the forms of most models, DeepSeek's, with full-width bars,
and Gemma's. Not `[INST]` and the like, which is that in Llama 2's."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""What looks as if it were meant to be one token at the place where a model has to stop."""


def check_template_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Refuse a template that writes special tokens which the vocabulary does not have.

    Spelt out in several ordinary tokens, they would be learnt as text, and none of them would end an answer. The
    template that comes with a model may have such markers, since the model was trained with them so (Zephyr's
    `<|user|>`): there it is enough that what ends a turn is a special token. In any other template, markup behind an
    answer must be a token, whatever it looks like.

    Raises:
        UserError: naming the tokens, and what to do.
    """
    end = template.end_of_turn()
    [end_ids] = tokenizer.tokenize([end], allow_special=True)
    ends_by_special = not tokenizer.special_ids.isdisjoint(end_ids)
    texts = _tokens_of(template)
    if not ends_by_special and not template.of_model:
        texts += _MARKUP.findall(end)
    missing = [token for token in dict.fromkeys(texts) if tokenizer.id_of(token) is None]
    if missing and template.of_model and ends_by_special:
        logger.warning(f"{template.name} writes {', '.join(missing)}, which the tokenizer encodes as ordinary text")
    elif missing:
        raise UserError(
            f"{template.name} writes {', '.join(missing)}, which the vocabulary does not have; choose another "
            f"--dataloader.chat_template, or add the tokens: --tokenizer.added_tokens {' '.join(map(repr, missing))}"
        )
    elif not ends_by_special:
        logger.warning(
            f"{template.name} writes no special token behind an answer: a model that is trained with it will not stop"
        )


def _tokens_of(template: ChatTemplate) -> list[str]:
    """The texts that it may write and that must be tokens, in order."""
    shaped = [token for text in template.literals for token in _LOOKS_SPECIAL.findall(text)]
    return [*shaped, *template.required_tokens]
