"""`ChatTemplate`, which renders conversations like transformers, and functions that load
templates."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES, REQUIRED_TOKENS
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, in_words, os_errors_as
from torchtitan.tools.files import file_to_copy, read_object, read_regular

if TYPE_CHECKING:
    import jinja2

    from torchtitan.components.chat_template import replay

Message = Mapping[str, object]
"""`role` ("system", "user", "assistant", …), `content`, and any other keys that the template
reads."""

Span = tuple[int, int]
"""Start and end of a piece of text, in characters."""

_WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_NOT_OPTIONS = (
    *(
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        *_SPECIAL_TOKENS,
    ),
    *("namespace", "range", "dict", "cycler", "joiner", "raise_exception", "strftime_now"),
)
"""Variables that every template may read, and functions."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys with an assistant's reasoning."""

_LONGEST_SOURCE = 2**20
"""Limit in characters, 50 times the longest published templates."""


class _Compiled(NamedTuple):
    """A template and what its source tells about it."""

    environment: "jinja2.Environment"
    template: "jinja2.Template"
    literals: Sequence[str]
    marks_generation: bool
    read: frozenset[str]
    """Variables that it reads without setting them first."""


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> _Compiled:
    """Compile a template: once for the loaders, samplers and exports of a run. Raise the errors of
    Jinja."""
    from torchtitan.components.chat_template import sandbox

    environment = sandbox.create_environment()
    tree = environment.parse(source)
    literals, marks = sandbox.literals(tree), sandbox.marks_generation(tree)
    read = frozenset(sandbox.undeclared(tree, environment))
    template = environment.from_string(sandbox.add_charges(tree, environment))
    return _Compiled(environment, template, literals, marks, read)


class ChatTemplate:
    """A compiled template. Raises `UserError` for an invalid template.

    Args:
        source: Jinja source, which may be untrusted and runs in a sandbox.
        variables: variables besides the conversation, such as `bos_token`.
        name: name in error messages.
        required_tokens: texts that must be tokens of the vocabulary even though they do not look
            special.
        of_model: whether the model was trained with this template.
    """

    source: str
    """Original source, for export."""
    literals: list[str]
    """Literal texts in the template."""
    marks_generation: bool
    """True if `{% generation %}…{% endgeneration %}` marks the assistant's text."""
    option_names: list[str]
    """Variables that the template reads besides the conversation and the special tokens."""

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

        from torchtitan.components.chat_template import replay

        if len(source) > _LONGEST_SOURCE:
            raise UserError(
                f"{name} has {len(source):,} characters; the limit is {_LONGEST_SOURCE:,}"
            )
        try:
            compiled = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{name} is not valid Jinja, line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise UserError(f"{name} is nested too deeply") from error
        except Exception as error:  # Jinja generates Python code, which may be invalid
            raise UserError(f"{name} is not valid Jinja: {in_words(error)}") from error
        self.literals = list(compiled.literals)
        self.marks_generation = compiled.marks_generation
        self._read = compiled.read
        self.option_names = sorted(self._read - {*_NOT_OPTIONS, *(variables or {})})
        self._template = compiled.template
        self._replays = replay.Replays(source, compiled.environment)
        self.source = source
        self.name = name
        self.of_model = of_model
        self.variables, self.required_tokens = dict(variables or {}), tuple(required_tokens)

    def reads(self, name: str) -> bool:
        """Return whether a variable with this name can change the text."""
        return name in self._read

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
        null_content: bool = False,
        **variables: object,
    ) -> str:
        """Return the text of a conversation with special tokens; encode it with `allow_special` and
        without adding BOS. Raise `UserError` if the template rejects the conversation (with its own
        message) or fails.

        Args:
            add_generation_prompt: end with the header of the assistant's next turn.
            tools: JSON schemas of the functions that the model may call.
            null_content: give null as the content of messages without one, which some templates
                test for; transformers and the default leave the key out.
            variables: options of the template, such as Qwen3's `enable_thinking`.
        """
        return self.render_inputs(
            self.inputs(messages, null_content=null_content),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **variables,
        )

    def inputs(
        self, messages: Sequence[Message], *, null_content: bool = False
    ) -> "list[replay.Input]":
        """Return what the template gets of messages, for several renderings. Arguments are those of
        `render`."""
        from torchtitan.components.chat_template import replay

        return [replay.Input.of(turn) for turn in _as_template_inputs(messages, null_content)]

    def render_inputs(
        self,
        inputs: "Sequence[replay.Input]",
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return `render` of the messages of `inputs`."""
        known = self._known(tools, {"add_generation_prompt": add_generation_prompt, **variables})

        def run() -> str:
            return self._run([one.values for one in inputs], known)[0]

        return self._replays.render(inputs, known, run)

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        null_content: bool = False,
        **variables: object,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the marked spans in order. Raise `UserError` as
        `render` does, or if the positions of marks are unknown, for example in a macro."""
        turns = _as_template_inputs(messages, null_content)
        known = self._known(tools, {"add_generation_prompt": False, **variables})
        rendered, marks = self._run(turns, known)
        if any(not rendered.startswith(text, start) for start, text in marks):
            raise UserError(
                f"{self.name} uses {{% generation %}} inside a macro, filter or variable, so the "
                "marked text cannot be located; put it directly around the assistant's turn"
            )
        return rendered, [(start, start + len(text)) for start, text in marks]

    def _known(
        self, tools: Sequence[Mapping[str, object]] | None, variables: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the variables of a rendering besides the messages."""
        # Some templates, such as Llama 3.1's, treat an empty list of tools differently from None.
        return {"tools": tools or None, "documents": None, **self.variables, **variables}

    def _run(
        self, turns: Sequence[Message], known: Mapping[str, object]
    ) -> tuple[str, list[tuple[int, str]]]:
        """Return the text, and the start and text of each mark."""
        import jinja2.sandbox

        from torchtitan.components.chat_template import sandbox

        blocks, progress = [], sandbox.Progress()
        known = {**known, sandbox.PROGRESS: progress, "messages": turns}
        try:
            for block in self._template.generate(known):
                blocks.append(block)
                progress.n_characters += len(block)
        except sandbox.WorkLimitError as error:
            raise UserError(
                f"{self.name} exceeds the time or memory limit for this conversation; use another "
                "template"
            ) from error
        except jinja2.sandbox.SecurityError as error:
            raise UserError(
                f"{self.name} does what the sandbox for templates forbids here and in transformers "
                f"({str(error).rstrip('.')}); set a copy that does not, such as by `+` instead of "
                "`append`"
            ) from error
        except jinja2.TemplateError as error:
            raise UserError(f"{self.name} rejects this conversation: {error}") from error
        except Exception as error:  # a template may raise any error
            without = "" if known["tools"] or not self.reads("tools") else " without tools"
            raise UserError(
                f"{self.name} failed for this conversation{without}: {in_words(error)}"
            ) from error
        return "".join(blocks), progress.marks


def _as_template_inputs(messages: Sequence[Message], null_content: bool) -> list[dict[str, object]]:
    turns = [_as_template_input(message) for message in messages]
    return [{"content": None, **turn} for turn in turns] if null_content else turns


def _as_template_input(message: Message) -> dict[str, object]:
    """Drop keys with null values, and provide the reasoning under both names that templates use, as
    transformers."""
    known = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING:
        if name in known:
            return {"thinking": known[name], **known, "reasoning_content": known[name]}
    return known


def resolve_chat_template(
    name_or_path: str,
    folders: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    option: str = "--dataloader.chat_template",
) -> ChatTemplate:
    """Return the selected template. Raise `UserError` if it does not exist, or does not fit the
    tokenizer.

    Args:
        name_or_path: empty for the model's template; a name of `BUILT_IN_TEMPLATES`, which uses the
            tokenizer's EOS and BOS (if it adds BOS); or a file: Jinja, or a `tokenizer_config.json`
            with a template.
        folders: folders of the model; see `load_chat_template`.
        tokenizer: tokenizer for the rendered text.
        option: name of the option that sets `name_or_path`, for messages.
    """
    if name_or_path in BUILT_IN_TEMPLATES:
        return _built_in(name_or_path, tokenizer)
    if name_or_path:
        return _from_file(Path(name_or_path), folders, tokenizer, option)
    if template := load_chat_template(*folders):
        return template
    raise UserError(
        f"there is no chat template in {' or '.join(map(str, folders)) or 'the model'} "
        "(chat_template.jinja, or chat_template in tokenizer_config.json): the model may not be "
        f"trained on conversations; set {option} to a file or one of: "
        f"{', '.join(BUILT_IN_TEMPLATES)}"
    )


def load_chat_template(*folders: Path) -> ChatTemplate | None:
    """Return the first template in a model's folders: `chat_template.jinja`, else `chat_template`
    of `tokenizer_config.json` or of `chat_template.json`, which older processors have, else None.
    Its variables include the special tokens of `tokenizer_config.json`, else
    `special_tokens_map.json`.

    With several templates, in `additional_chat_templates/` or as a list, `tool_use` renders
    conversations with tools, and `default` all others, as in transformers. Raise `UserError` if a
    template cannot be read, or the template for tools is a link to a file outside the folder.
    """
    for folder in folders:
        file = folder / "chat_template.jinja"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        source = _read(file) if file.is_file() else None
        of_processor = folder / "chat_template.json"
        if source is None and of_processor.is_file():
            file, source = of_processor, _read(of_processor)
        if source is not None and file.suffix == ".jinja" and (folder / _WITH_TOOLS).is_file():
            # Checkpoints include a copy of the template.
            source = _combine_by_tools(
                source, _read_text(file_to_copy(folder, _WITH_TOOLS)), str(folder)
            )
        if source is not None:
            return ChatTemplate(
                source, _tokens_of(folders), f"the chat template in '{file}'", of_model=True
            )
    return None


def _built_in(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source, texts = BUILT_IN_TEMPLATES[name], _bos_and_eos(tokenizer)
    if "eos_token" in source and tokenizer.eos_id is None:
        raise UserError(
            f"the chat template {name} needs EOS, which the tokenizer does not define; use chatml"
        )
    if not tokenizer.adds_bos:
        texts["bos_token"] = ""
    # The template itself sets its tokens, so that tokens declared in other files have no effect.
    tokens = "".join(
        f"{{%- set {key} = {json.dumps(text)} %}}\n" for key, text in texts.items() if key in source
    )
    required = REQUIRED_TOKENS.get(name, ())
    return ChatTemplate(
        tokens + source, name=f"the built-in chat template {name}", required_tokens=required
    )


def _from_file(
    path: Path, folders: Sequence[Path], tokenizer: Tokenizer, option: str
) -> ChatTemplate:
    return ChatTemplate(
        read_template(path, option),
        _bos_and_eos(tokenizer) | _tokens_of(folders),
        f"the chat template in '{path}'",
    )


def read_template(path: Path, option: str) -> str:
    """Return the text of the template in a file: Jinja, or JSON with `chat_template`. Raise
    `UserError` that names the option if there is no such file, or no template in it."""
    if not path.is_file():
        raise UserError(
            f"{option} {path} is neither a file nor one of the built-in templates: "
            f"{', '.join(BUILT_IN_TEMPLATES)}"
        )
    source = _read(path)
    if source is None:
        raise UserError(f"{option}: '{path}' has no chat_template")
    return source


def _bos_and_eos(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        name: "" if token_id is None else tokenizer.decode([token_id])
        for name, token_id in ids.items()
    }


def _read_text(file: Path) -> str:
    with os_errors_as(f"the chat template '{file}' cannot be read"):
        return read_regular(file).decode("utf-8")


def _read(file: Path) -> str | None:
    """Read a template from a Jinja file or a JSON file with `chat_template`; None if the latter has
    no template."""
    if file.suffix != ".json":
        return _read_text(file)
    declared = read_object(file).get("chat_template")
    if isinstance(declared, list):
        keys = ("name", "template")
        if not all(
            isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in keys)
            for entry in declared
        ):
            raise UserError(
                f"'{file}' has a list of chat templates with an entry without name or template"
            )
        templates = {entry["name"]: entry["template"] for entry in declared}
        if "default" not in templates:
            raise UserError(
                f"'{file}' has the chat templates {', '.join(templates) or '(none)'}, but none "
                "named default; save one to a file, and select the file"
            )
        if "tool_use" in templates:
            return _combine_by_tools(templates["default"], templates["tool_use"], str(file))
        return templates["default"]
    if not (declared is None or isinstance(declared, str)):
        raise UserError(
            f"'{file}': chat_template must be text or a list of named templates, not {declared!r}"
        )
    return declared


def _combine_by_tools(default: str, with_tools: str, where: str) -> str:
    """Combine two templates: `with_tools` applies if there are tools, else `default`."""
    names = {"default": default, "tool_use": with_tools}
    marked = {
        name: ChatTemplate(text, name=f"the chat template {name} in '{where}'")
        for name, text in names.items()
    }
    if len({template.marks_generation for template in marked.values()}) > 1:
        raise UserError(
            f"only one of the chat templates default and tool_use in '{where}' marks the "
            "assistant's text by {% generation %}; add marks to both, or to neither"
        )
    # Jinja drops a template's last newline, the first one after a tag and, unless there is a `+`,
    # blanks before a tag.
    default, with_tools = (
        text.removesuffix("\n").removesuffix("\r") for text in (default, with_tools)
    )
    return (
        f"{{% if tools is defined and tools is not none %}}\n{with_tools}{{%+ else "
        f"%}}\n{default}{{%+ endif %}}"
    )


def _tokens_of(folders: Sequence[Path]) -> dict[str, str]:
    """Return the special tokens declared in the folders; the first folder takes precedence."""
    texts = {}
    # The second file takes precedence, as for the tokenizer's ids. (In transformers, the first one
    # does if the second has no `added_tokens_decoder`, which matters only if the files disagree.)
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
