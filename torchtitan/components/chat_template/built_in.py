"""Built-in chat templates, from `torchtitan/assets/chat_templates`. Their generation marks cover
the assistant's text, including the token that ends its turn."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_FOLDER = Path(__file__).parents[2] / "assets/chat_templates"

_REFUSE_TOOLS = """\
{%- if tools or messages | selectattr("tool_calls", "defined") | list %}
    {{- raise_exception("it has no form for tools; use the model's own template, or chatml") }}
{%- endif %}
"""

_REFUSE_ROLE = (
    """{{- raise_exception("it has no form for the role " + message.role + " at this place") }}"""
)


def _text_of(name: str) -> str:
    text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return text.replace("REFUSE_TOOLS\n", _REFUSE_TOOLS).replace("REFUSE_ROLE", _REFUSE_ROLE)


BUILT_IN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {name: _text_of(name) for name in ("chatml", "llama3", "mistral", "alpaca")}
)
"""Name → template. `resolve_chat_template` sets `bos_token` and `eos_token` from the tokenizer.

- `chatml`: turns between `<|im_start|>` and `<|im_end|>`; tools and tool calls as JSON between
  tags.
- `llama3`: Llama 3's headers and `<|eot_id|>`, which only its vocabulary has.
- `mistral`: questions between `[INST]` and `[/INST]`, as in Mistral v0.3; EOS after the answer. The
  system message precedes the first question. In Mistral's own template it precedes the last
  question, and so moves with every turn.
- `alpaca`: `### Instruction:` and `### Response:` as ordinary text; EOS after the answer.
"""

REQUIRED_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mistral": ("[INST]", "[/INST]")}
)
"""Special tokens of built-in templates that do not look like special tokens."""
