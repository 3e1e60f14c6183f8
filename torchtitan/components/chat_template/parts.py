"""Parts of replies."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.components.chat_template.calls import Call

Kind = Literal["reasoning_content", "content"]


@dataclass(slots=True)
class Piece:
    """New parts of a reply."""

    texts: dict[Kind, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def add(self, kind: Kind, text: str) -> None:
        """Append text."""
        if text:
            self.texts[kind] = self.texts.get(kind, "") + text
