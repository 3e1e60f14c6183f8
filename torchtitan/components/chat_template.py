"""A model's chat template: the text that its conversations are trained on, as a Jinja template beside the tokenizer.

Rendered by the conventions of the library transformers, which the templates are written for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchtitan.tools.errors import UserError
from torchtitan.tools.json_file import read_object

if TYPE_CHECKING:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

Message = Mapping[str, Any]
"""`role` ("system", "user", "assistant", …), `content`, and whatever else the template reads."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The format ChatML: each turn between `<|im_start|>` and `<|im_end|>`."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template, in Jinja's language. It may come from anywhere, so it runs in Jinja's sandbox.
        variables: what it can read beside the conversation, such as `bos_token`.

    Raises:
        UserError: if it is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None):
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. It spells special tokens: encode it with `allow_special`, without another BOS.

        Args:
            messages: in their order.
            add_generation_prompt: end with the beginning of the assistant's next turn.
            tools: JSON schemas of the functions that the model may call.
            variables: options of this template, such as Qwen3's `enable_thinking`.

        Raises:
            UserError: if the template does not take this conversation, with its own words.
        """
        import jinja2

        known = {"tools": tools, "documents": None, **self._variables, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template in a model's folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (of
    several named ones, `default`); None where there is none.

    Raises:
        UserError: if there is one that cannot be read.
    """
    settings = read_object(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    tokens = {name: settings.get(name) for name in _SPECIAL_TOKENS}
    # A token is written as a string or, by older versions, as an object.
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}
    return ChatTemplate(source, texts)


def _environment() -> "jinja2.sandbox.ImmutableSandboxedEnvironment":
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks what the assistant says; its text is that between."""

        tags = {"generation"}

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape characters that mean something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
