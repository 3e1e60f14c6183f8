"""Chat templates: Jinja templates that render conversations to text."""

from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES as BUILT_IN_TEMPLATES
from torchtitan.components.chat_template.template import ChatTemplate as ChatTemplate
from torchtitan.components.chat_template.template import Message as Message
from torchtitan.components.chat_template.template import Span as Span
from torchtitan.components.chat_template.template import load_chat_template as load_chat_template
from torchtitan.components.chat_template.template import (
    resolve_chat_template as resolve_chat_template,
)
