"""`ChatTemplate`: renders conversations, by the conventions of the library transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.components.chat_template.marks import with_marks
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

Message = Mapping[str, Any]
"""`role` ("system", "user", "assistant", …), `content`, and whatever else the template reads."""

Span = tuple[int, int]
"""Where a piece of text begins and ends, in characters."""

_PROBE = "Answer"

_LONGEST_SOURCE = 2**20
"""In characters; the longest published templates have a fiftieth of that."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template, in Jinja's language. It may come from anywhere, so it runs in a sandbox.
        variables: what it can read beside the conversation, such as `bos_token`.
        name: what messages call it.
        required_tokens: texts in it that must be tokens of the vocabulary, though they do not look special.
        of_model: whether it is the one that a model was trained with, not one that is put upon it.

    Raises:
        UserError: if it is not a template.
    """

    source: str
    """As it was given: a published template that gets its marks here is exported without them."""
    name: str
    of_model: bool
    required_tokens: tuple[str, ...]
    variables: dict[str, str]
    literals: list[str]
    """The texts in it that it may write."""
    marks_generation: bool
    """Whether `{% generation %}…{% endgeneration %}` says what the assistant writes, also if `with_marks` added it."""

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
        """The text of a conversation. It spells special tokens: encode it with `allow_special`, without another BOS.

        Args:
            messages: in their order.
            add_generation_prompt: end with the beginning of the assistant's next turn.
            tools: JSON schemas of the functions that the model may call; an empty list counts as none.
            variables: options of this template, such as Qwen3's `enable_thinking`.

        Raises:
            UserError: if the template does not take this conversation, with its own words, or fails at it.
        """
        return self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})[0]

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans that the template marks as written by the assistant, in order.

        Raises:
            UserError: as `render`; and where marks are in a macro, say, whose text has no place in the whole yet.
        """
        rendered, marks = self._render(messages, tools, {"add_generation_prompt": False, **variables})
        if any(not rendered.startswith(text, start) for start, text in marks):
            raise UserError(
                f"{self.name} has {{% generation %}} inside of a macro, a filter or a variable, where it cannot be "
                "told which text it marks; put it around the assistant's turn itself"
            )
        return rendered, [(start, start + len(text)) for start, text in marks]

    def end_of_turn(self) -> str:
        """What it writes behind an answer, without white space; empty where nothing, or where that cannot be told."""
        turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, tail = self.render(turns, add_generation_prompt=False).rpartition(_PROBE)
        except UserError:
            return ""
        return tail.strip() if found else ""

    def end_of_turn_id(self, tokenizer: Tokenizer) -> int | None:
        """The special token that it writes behind an answer, if there is one: there a model has to stop."""
        [ids] = tokenizer.tokenize([self.end_of_turn()], allow_special=True)
        return ids[0] if ids and ids[0] in tokenizer.special_ids else None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, str]]]:
        """The text; of each mark, where it begins, and what it marks."""
        import jinja2

        from torchtitan.components.chat_template import sandbox

        blocks, progress = [], sandbox.Progress()
        turns = [_as_templates_read_it(turn) for turn in messages]
        # Llama 3.1's template, for one, would write something else for an empty list of tools.
        known = {"tools": tools or None, "documents": None, **self.variables, **variables}
        known |= {sandbox.PROGRESS: progress, "messages": turns}
        try:
            for block in self._template.generate(known):
                blocks.append(block)
                progress.n_characters += len(block)
        except sandbox.TooMuchError as error:
            raise UserError(
                f"{self.name} takes too long at this conversation, or too much memory; use another template"
            ) from error
        except jinja2.TemplateError as error:
            raise UserError(f"{self.name} refuses this conversation: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(f"{self.name} fails at this conversation: {type(error).__name__}: {error}") from error
        return "".join(blocks), progress.marks


def _as_templates_read_it(message: Message) -> dict[str, Any]:
    """Without the keys that have no value, and with a model's reasoning under both names that templates look for."""
    known = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((known[name] for name in names if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}
