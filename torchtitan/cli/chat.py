"""`torchtitan chat`: a conversation with a checkpoint's model."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchtitan.cli.model_options import (
    OpenedModel,
    add_model_options,
    add_sampling_options,
    open_model,
    run_command,
    sampling_of,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import for_output, print_error

if TYPE_CHECKING:
    from torchtitan.components.chat_template import ChatTemplate
    from torchtitan.components.generation import Sampling

_HELP = "each line is a message; /reset starts over, /exit or Ctrl-D ends"


def chat(args: Sequence[str]) -> int:
    """Answer the lines of standard input, one after the other; the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchtitan chat",
        description="Talk with a model, in the format of its own chat template. Each line of standard input is a "
        "message, each answer goes to standard output as it comes; /reset starts over, /exit or Ctrl-D ends.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message that stands before the conversation")
    parser.add_argument(
        "--template",
        default="",
        metavar="NAME|FILE",
        help="use this format instead of the chat template in the checkpoint: chatml, llama3, mistral, alpaca, or a "
        "file in Jinja",
    )
    add_sampling_options(parser)
    add_model_options(parser)
    options = parser.parse_args(args)
    return run_command("chat", lambda: _chat(options))


def _chat(options: argparse.Namespace) -> None:
    from torchtitan.components.chat_template import resolve_chat_template

    sampling = sampling_of(options)
    opened = open_model(options)
    template = resolve_chat_template(options.template, opened.folders, opened.tokenizer, option="--template")
    conversation = Conversation(opened, template, options, sampling)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            try:
                conversation.answer(line)
            except UserError as error:
                print_error("chat", error)


class Conversation:
    """The turns so far; each answer is printed as it comes.

    Args:
        opened: the model.
        template: writes the turns as text.
        options: `system`, `stop` and `max_new_tokens` of the command line.
        sampling: how tokens are drawn.
    """

    def __init__(
        self, opened: OpenedModel, template: "ChatTemplate", options: argparse.Namespace, sampling: "Sampling"
    ):
        from torchtitan.components.generation import stop_ids

        self._opened, self._template, self._sampling = opened, template, sampling
        end, end_id = template.end_of_turn(), template.end_of_turn_id(opened.tokenizer)
        self._stop_ids = stop_ids(opened.tokenizer, *opened.folders) | ({end_id} if end_id is not None else set())
        # Where the vocabulary lacks it, the model has to spell it.
        self._stop = [*options.stop, *([end] if end and end_id is None else [])]
        self._max_new_tokens: int = options.max_new_tokens
        self._system = [{"role": "system", "content": options.system}] if options.system else []
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self._system)

    def answer(self, text: str) -> None:
        """Print what the model says to `text`, and a newline; both turns are remembered.

        Raises:
            UserError: where the template or the model's context does not take another turn; nothing changes then.
        """
        from torchtitan.components.generation import TextStream, generate

        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._template.render(messages, add_generation_prompt=True)
        prompt = self._opened.tokenizer.encode(rendered, add_bos=False, add_eos=False, allow_special=True)
        stream = TextStream(self._opened.tokenizer, prompt, self._stop)

        def on_token(row: int, token: int) -> bool:
            print(for_output(stream.push(token)), end="", flush=True)
            return stream.stopped

        generate(
            self._opened.model,
            [prompt],
            max_new_tokens=self._room(prompt),
            sampling=self._sampling,
            stop_ids=self._stop_ids,
            on_token=on_token,
        )
        print(for_output(stream.finish()), flush=True)
        self.messages = [*messages, {"role": "assistant", "content": stream.text}]

    def _room(self, prompt: list[int]) -> int:
        context = self._opened.context
        if len(prompt) >= context:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, and the model's context {context}; /reset starts over"
            )
        return min(self._max_new_tokens, context - len(prompt))


def _lines() -> Iterator[str]:
    """The lines of standard input, with a prompt on standard error where it is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    from rich.console import Console

    console = Console(stderr=True)
    console.print(_HELP, style="dim")
    while True:
        try:
            yield console.input("[bold]> [/bold]").strip()
        except EOFError:
            return
