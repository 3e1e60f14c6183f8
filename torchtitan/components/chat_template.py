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
        name: what messages call it.

    Raises:
        UserError: if it is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, name: str = "the chat template"):
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name} is not valid Jinja, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise UserError(f"{name} is nested too deeply to be read") from error
        self._variables, self._name = dict(variables or {}), name

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
            UserError: if the template does not take this conversation, with its own words, or fails at it.
        """
        import jinja2

        known = {"tools": tools, "documents": None, **self._variables, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except jinja2.TemplateError as error:
            raise UserError(f"{self._name} refuses this conversation: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(f"{self._name} fails at this conversation: {type(error).__name__}: {error}") from error


def load_chat_template(*folders: Path) -> ChatTemplate | None:
    """The template in the first of a model's folders that has one: `chat_template.jinja`, else `chat_template` of
    `tokenizer_config.json` (of several named ones, `default`); None where there is none.

    It can read the special tokens that `tokenizer_config.json` names or, where it does not, `special_tokens_map.json`.

    Raises:
        UserError: if there is one that cannot be read.
    """
    for folder in folders:
        file, source = _find_source(folder)
        if source is not None:
            tokens = {name: text for of in reversed(folders) for name, text in _special_tokens(of).items()}
            return ChatTemplate(source, tokens, f"the chat template in '{file}'")
    return None


def _find_source(folder: Path) -> tuple[Path, str | None]:
    """The file that has, or would have, a folder's template, and the template."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file, file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the chat template '{file}' cannot be read: {error}") from error
    file = folder / "tokenizer_config.json"
    declared = read_object(file).get("chat_template")
    if isinstance(declared, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in declared):
            raise UserError(f"'{file}' has a list of chat templates, and must have a name and a template in each entry")
        declared = next((entry["template"] for entry in declared if entry["name"] == "default"), None)
    if not (declared is None or isinstance(declared, str)):
        raise UserError(f"'{file}' has the chat_template {declared!r}, and must have a text or a list of named ones")
    return file, declared


def _special_tokens(folder: Path) -> dict[str, str]:
    texts = {}
    # The second wins, as for the tokenizer's ids. (In transformers, which reads the first one only where the second has
    # no `added_tokens_decoder`, it wins then: that shows only where the two contradict each other.)
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        content = read_object(path)
        for name in _SPECIAL_TOKENS:
            # A token is written as a string or, by older versions, as an object.
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if text is not None and not isinstance(text, str):
                raise UserError(f"'{path}' has {name} {token!r}, which is not a token")
            if text:
                texts[name] = text
    return texts


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
