"""The chat templates known by name, from `torchtitan/assets/chat_templates`. Their generation marks cover what the
assistant writes, including the token that ends its turn."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_FOLDER = Path(__file__).parents[2] / "assets/chat_templates"

_REFUSE_TOOLS = """\
{%- if tools or messages | selectattr("tool_calls", "defined") | list %}
    {{- raise_exception("it has no form for tools; use the model's own template, or chatml") }}
{%- endif %}
"""

_REFUSE_ROLE = """{{- raise_exception("it has no form for the role " + message.role + " at this place") }}"""


def _text_of(name: str) -> str:
    text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return text.replace("REFUSE_TOOLS\n", _REFUSE_TOOLS).replace("REFUSE_ROLE", _REFUSE_ROLE)


BUILT_IN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {name: _text_of(name) for name in ("chatml", "llama3", "mistral", "alpaca")}
)
"""Name → template, which reads `bos_token` and `eos_token`: `resolve_chat_template` sets them for a tokenizer.

- `chatml`: each turn between `<|im_start|>` and `<|im_end|>`; tools and their calls as JSON, between tags.
- `llama3`: Llama 3's headers and `<|eot_id|>`, which are in its vocabulary only.
- `mistral`: the question between `[INST]` and `[/INST]`, as in Mistral v0.3; EOS after the answer. The system message
  precedes the first question: before the last one, as in Mistral's own template, it would move with every turn.
- `alpaca`: `### Instruction:` and `### Response:`, of ordinary text; EOS behind the answer.
"""

REQUIRED_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType({"mistral": ("[INST]", "[/INST]")})
"""Special tokens of a built-in template that are not recognizable by their spelling."""
