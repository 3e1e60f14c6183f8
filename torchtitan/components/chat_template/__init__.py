"""Chat templates: the text that a model's conversations are trained on, as Jinja templates beside the tokenizer."""

from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES
from torchtitan.components.chat_template.template import (
    ChatTemplate,
    Message,
    Span,
    load_chat_template,
    resolve_chat_template,
)

__all__ = ["BUILT_IN_TEMPLATES", "ChatTemplate", "Message", "Span", "load_chat_template", "resolve_chat_template"]
