"""Special tokens of a template that the vocabulary lacks."""

import re

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|<(?:start|end)_of_turn>")
"""Text that can only be a special token, in the forms of most models, DeepSeek (full-width bars)
and Gemma. Excludes `[INST]` and similar markers, which are ordinary text in Llama 2."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Text that looks like a single token; applied only to the end of an answer."""


def check_template_tokens(template: ChatTemplate, tokenizer: Tokenizer, stops: Stops) -> None:
    """Raise `UserError` if the template writes special tokens that are not in the vocabulary.

    They would be learned as ordinary text, and none would end an answer. A model's own template may
    contain such markers (Zephyr's `<|user|>`) if a special token ends its turns. In any other
    template, all markup after an answer must be special tokens.
    """
    found = stops.all()
    ends_with_special = any(stop.token_id is not None for stop in found)
    end = found[0].text if found else ""
    texts = [token for text in template.literals for token in _LOOKS_SPECIAL.findall(text)]
    texts += template.required_tokens
    if not ends_with_special and not template.of_model:
        texts += _MARKUP.findall(end)
    missing = [token for token in dict.fromkeys(texts) if tokenizer.id_of(token) is None]
    if missing and template.of_model and ends_with_special:
        logger.warning(
            f"{template.name} writes {', '.join(missing)}, which the tokenizer encodes as ordinary "
            "text"
        )
    elif missing:
        raise UserError(
            f"{template.name} writes {', '.join(missing)}, which the vocabulary does not contain; "
            "set another --dataloader.chat_template, or add the tokens with "
            "--tokenizer.added_tokens " + " ".join(map(repr, missing))
        )
    elif not ends_with_special:
        logger.warning(
            f"{template.name} writes no special token after an answer: a model trained with it "
            "will not stop"
            + (f" by itself; generation ends at the text {end!r}" if end.strip() else "")
        )
