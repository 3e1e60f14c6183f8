"""Conversations with earlier calls, for a model that answers them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.conversation import Message
from torchtitan.components.data.finetuning.losses import lost_parts
from torchtitan.tools.errors import UserError

_FORMS: Sequence[tuple[Mapping[str, object], bool]] = (
    ({}, False),
    ({"content": ""}, False),
    ({}, True),
)
"""Further keys of messages that call and have no content, and whether their content is null."""


def render_history(template: ChatTemplate, messages: Sequence[Message], /, **variables: Any) -> str:
    """Return the text of a conversation up to the model's turn. Templates expect a different
    content of a message that only calls: none, an empty text, or null. The first of these that the
    template takes and whose calls it writes is used; else the first one that it takes. Raise
    `UserError` if it takes none.

    Args:
        variables: as for `ChatTemplate.render`.
    """
    silent = [
        number
        for number, message in enumerate(messages)
        if message.get("tool_calls") and message.get("content") is None
    ]
    found: list[str] = []
    error: UserError | None = None
    for keys, is_null in _FORMS if silent else _FORMS[:1]:
        formed = [{**one, **keys} if n in silent else one for n, one in enumerate(messages)]
        try:
            text = template.render(
                formed, add_generation_prompt=True, null_content=is_null, **variables
            )
        except UserError as refused:
            error = error or refused
            continue
        found.append(text)
        if not any("tools" in lost_parts(messages[number], text) for number in silent):
            return text
    if not found:
        assert error is not None
        raise error
    return found[0]
