"""`ChatTemplate`, which renders conversations like transformers, and the loading of templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES, REQUIRED_TOKENS
from torchtitan.components.chat_template.marks import with_marks
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import file_to_copy, read_object

Message = Mapping[str, Any]
"""`role` ("system", "user", "assistant", …), `content`, and any other keys that the template reads."""

Span = tuple[int, int]
"""Start and end of a piece of text, in characters."""

_PROBE = "Answer"
_WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_LONGEST_SOURCE = 2**20
"""Limit in characters; the longest published templates have a fiftieth of it."""


class ChatTemplate:
    """A compiled template. Raises `UserError` if it is not one.

    Args:
        source: the template, in Jinja's language. It may come from anywhere, so it runs in a sandbox.
        variables: values it can read besides the conversation, such as `bos_token`.
        name: its name in messages.
        required_tokens: texts in it that must be tokens of the vocabulary, though they do not look special.
        of_model: True for the template that the model was trained with.
    """

    source: str
    """Original source: a published template that gets its marks here is exported without them."""
    literals: list[str]
    """Texts in it that it may write."""
    marks_generation: bool
    """True if `{% generation %}…{% endgeneration %}` marks the assistant's text, also if added by `with_marks`."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        name: str = "the chat template",
        *,
        required_tokens: Sequence[str] = (),
        of_model: bool = False,
    ):
        import jinja2

        from torchtitan.components.chat_template import sandbox

        if len(source) > _LONGEST_SOURCE:
            raise UserError(f"{name} has {len(source):,} characters, and may have {_LONGEST_SOURCE:,} at most")
        environment = sandbox.environment()
        try:
            tree = environment.parse(with_marks(source))
            self.literals, self.marks_generation = sandbox.literals(tree), sandbox.marks_generation(tree)
            self._template = environment.from_string(sandbox.bounded(tree, environment))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{name} is not valid Jinja, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise UserError(f"{name} is nested too deeply to be read") from error
        except Exception as error:  # Jinja makes Python of it, which Python can refuse in any way
            raise UserError(f"{name} is not valid Jinja: {type(error).__name__}: {error}") from error
        self.source, self.name, self.of_model = source, name, of_model
        self.variables, self.required_tokens = dict(variables or {}), tuple(required_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation with special tokens: encode it with `allow_special`, without another BOS.

        Args:
            add_generation_prompt: end with the beginning of the assistant's next turn.
            tools: JSON schemas of the functions that the model may call; an empty list counts as none.
            variables: options of this template, such as Qwen3's `enable_thinking`.

        Raises:
            UserError: if the template refuses this conversation (with its own message) or fails.
        """
        return self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})[0]

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that the template marks as the assistant's, in order. Raise
        `UserError` as `render`; also if marks are in a macro, for example, so that their position is unknown."""
        rendered, marks = self._render(messages, tools, {"add_generation_prompt": False, **variables})
        if any(not rendered.startswith(text, start) for start, text in marks):
            raise UserError(
                f"{self.name} has {{% generation %}} inside of a macro, a filter or a variable, where it cannot be "
                "told which text it marks; put it around the assistant's turn itself"
            )
        return rendered, [(start, start + len(text)) for start, text in marks]

    def end_of_turn(self) -> str:
        """Return the text after an answer, without white space; empty if there is none, or it cannot be found."""
        turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, tail = self.render(turns, add_generation_prompt=False).rpartition(_PROBE)
        except UserError:
            return ""
        return tail.strip() if found else ""

    def end_of_turn_id(self, tokenizer: Tokenizer) -> int | None:
        """Return the special token after an answer, if any: a model must stop there."""
        [ids] = tokenizer.tokenize([self.end_of_turn()], allow_special=True)
        return ids[0] if ids and ids[0] in tokenizer.special_ids else None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, str]]]:
        """Return the text, and start and text of each mark."""
        import jinja2

        from torchtitan.components.chat_template import sandbox

        blocks, progress = [], sandbox.Progress()
        turns = [_as_template_input(turn) for turn in messages]
        # Llama 3.1's template, for example, would write something else for an empty list of tools.
        known = {"tools": tools or None, "documents": None, **self.variables, **variables}
        known |= {sandbox.PROGRESS: progress, "messages": turns}
        try:
            for block in self._template.generate(known):
                blocks.append(block)
                progress.n_characters += len(block)
        except sandbox.WorkLimitError as error:
            raise UserError(
                f"{self.name} takes too long at this conversation, or too much memory; use another template"
            ) from error
        except jinja2.TemplateError as error:
            raise UserError(f"{self.name} refuses this conversation: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(f"{self.name} fails at this conversation: {type(error).__name__}: {error}") from error
        return "".join(blocks), progress.marks


def _as_template_input(message: Message) -> dict[str, Any]:
    """Drop keys without a value, and give a model's reasoning under both names that templates read."""
    known = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((known[name] for name in names if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def resolve_chat_template(
    name_or_path: str, folders: Sequence[Path], tokenizer: Tokenizer, *, option: str = "--dataloader.chat_template"
) -> ChatTemplate:
    """Return the selected template. Raise `UserError` if it cannot be found, read or used with the tokenizer.

    Args:
        name_or_path: empty for the model's own; a name of `BUILT_IN_TEMPLATES`, which then uses the tokenizer's BOS (if
            it adds one) and EOS; or a file: Jinja, or a `tokenizer_config.json` that has one.
        folders: the model's, see `load_chat_template`.
        tokenizer: encodes the texts.
        option: the option that sets `name_or_path`, for messages.
    """
    if name_or_path in BUILT_IN_TEMPLATES:
        return _built_in(name_or_path, tokenizer)
    if name_or_path:
        return _from_file(Path(name_or_path), folders, tokenizer, option)
    if template := load_chat_template(*folders):
        return template
    raise UserError(
        f"there is no chat template in {' or '.join(map(str, folders)) or 'the model'} (chat_template.jinja, or "
        f"chat_template in tokenizer_config.json): the model may not know conversations; {option} "
        f"{'|'.join(BUILT_IN_TEMPLATES)} sets one, as does a file"
    )


def load_chat_template(*folders: Path) -> ChatTemplate | None:
    """Return the first template in a model's folders: `chat_template.jinja`, else `chat_template` of
    `tokenizer_config.json`; None if there is none. It can read the special tokens of `tokenizer_config.json`, else
    `special_tokens_map.json`.

    If several are named, in `additional_chat_templates/` or as a list, `tool_use` writes the conversations with tools,
    and `default` the others, as in transformers. Raise `UserError` if the template cannot be read, or its part for
    tools is a link out of the folder.
    """
    for folder in folders:
        file = folder / "chat_template.jinja"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        source = _read(file) if file.is_file() else None
        if source is not None and file.suffix == ".jinja" and (folder / _WITH_TOOLS).is_file():
            # A run copies its template into its checkpoints.
            source = _chosen_by_tools(source, _read_text(file_to_copy(folder, _WITH_TOOLS)), str(folder))
        if source is not None:
            return ChatTemplate(source, _tokens_of(folders), f"the chat template in '{file}'", of_model=True)
    return None


def _built_in(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source, texts = BUILT_IN_TEMPLATES[name], _bos_and_eos(tokenizer)
    if "eos_token" in source and tokenizer.eos_id is None:
        raise UserError(
            f"the chat template {name} ends answers with EOS, which the tokenizer does not have; try chatml"
        )
    if not tokenizer.adds_bos:
        texts["bos_token"] = ""
    # Written into the template, so that it renders the same with any declared tokens.
    tokens = "".join(f"{{%- set {key} = {json.dumps(text)} %}}\n" for key, text in texts.items() if key in source)
    required = REQUIRED_TOKENS.get(name, ())
    return ChatTemplate(tokens + source, name=f"the built-in chat template {name}", required_tokens=required)


def _from_file(path: Path, folders: Sequence[Path], tokenizer: Tokenizer, option: str) -> ChatTemplate:
    if not path.is_file():
        raise UserError(
            f"{option} {path} is neither a file nor the name of a built-in template: {', '.join(BUILT_IN_TEMPLATES)}"
        )
    source = _read(path)
    if source is None:
        raise UserError(f"{option}: '{path}' has no chat_template")
    return ChatTemplate(source, _bos_and_eos(tokenizer) | _tokens_of(folders), f"the chat template in '{path}'")


def _bos_and_eos(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: "" if token_id is None else tokenizer.decode([token_id]) for name, token_id in ids.items()}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the chat template '{file}' cannot be read: {error}") from error


def _read(file: Path) -> str | None:
    """Return the template in a file of either kind; None if a `tokenizer_config.json` has none."""
    if file.suffix != ".json":
        return _read_text(file)
    declared = read_object(file).get("chat_template")
    if isinstance(declared, list):
        keys = ("name", "template")
        if not all(isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in keys) for entry in declared):
            raise UserError(f"'{file}' has a list of chat templates, and must have a name and a template in each entry")
        templates = {entry["name"]: entry["template"] for entry in declared}
        if "default" not in templates:
            raise UserError(
                f"'{file}' has the chat templates {', '.join(templates) or '(none)'}, and none is named default; "
                "write the one that is meant into a file, and name that"
            )
        if "tool_use" in templates:
            return _chosen_by_tools(templates["default"], templates["tool_use"], str(file))
        return templates["default"]
    if not (declared is None or isinstance(declared, str)):
        raise UserError(f"'{file}' has the chat_template {declared!r}, and must have a text or a list of named ones")
    return declared


def _chosen_by_tools(default: str, with_tools: str, where: str) -> str:
    """Return one template that equals `with_tools` if there are tools, else `default`."""
    names = {"default": default, "tool_use": with_tools}
    marked = {name: ChatTemplate(text, name=f"the chat template {name} in '{where}'") for name, text in names.items()}
    if len({template.marks_generation for template in marked.values()}) > 1:
        raise UserError(
            f"of the chat templates default and tool_use in '{where}' one marks by {{% generation %}} what the "
            "assistant writes, and the other does not; write marks into both, or into neither"
        )
    # Jinja drops a template's last newline, the first one after a tag and, unless there is a `+`, blanks before a tag.
    default, with_tools = (text.removesuffix("\n").removesuffix("\r") for text in (default, with_tools))
    return f"{{% if tools is defined and tools is not none %}}\n{with_tools}{{%+ else %}}\n{default}{{%+ endif %}}"


def _tokens_of(folders: Sequence[Path]) -> dict[str, str]:
    """Return the special tokens that the folders declare; the first folder wins."""
    texts = {}
    # The second file wins, as for the tokenizer's ids. (In transformers the first one wins if the second has no
    # `added_tokens_decoder`, which matters only if they contradict each other.)
    names = ("special_tokens_map.json", "tokenizer_config.json")
    for path in (folder / name for folder in reversed(folders) for name in names):
        content = read_object(path)
        for name in _SPECIAL_TOKENS:
            # A token is a string or, in older versions, an object.
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if text is not None and not isinstance(text, str):
                raise UserError(f"'{path}' has {name} {token!r}, which is not a token")
            if text:
                texts[name] = text
    return texts
