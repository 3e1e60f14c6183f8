"""`torchtitan generate` and `torchtitan chat`: generate text with a checkpoint's model."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torchtitan.cli.image_prompts import ImagePrompts, message
from torchtitan.cli.model_options import (
    OpenedModel,
    add_chat_template_option,
    add_model_options,
    add_sampling_options,
    open_model,
    run_command,
    sampling_of,
)
from torchtitan.tools.errors import UserError, os_errors_as, suggest
from torchtitan.tools.files import parse_json
from torchtitan.tools.logging import for_output, print_error
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.components.chat_template import ChatTemplate
    from torchtitan.components.generation import Generation
    from torchtitan.components.images.files import ImageFile
    from torchtitan.experiments.reward.rating import RewardModel


def generate(args: Sequence[str]) -> int:
    """Continue the prompts, print only them and their continuations (or JSON), and return the exit
    code."""
    parser = Parser(
        prog="torchtitan generate",
        description="Continue text with a model. Print each prompt with its continuation; stream "
        "the output of a "
        "single prompt. Speed is reported on standard error.",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated",
    )
    parser.add_argument(
        "--prompt_file",
        type=Path,
        metavar="FILE",
        help="file with another prompt; a newline at the end is removed",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="image that each prompt is about; may be repeated. A prompt is then a user's message "
        "after the images, in the model's chat template, and only the answer is printed",
    )
    add_chat_template_option(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON per prompt: prompt, text, finish_reason, tokens",
    )
    parser.add_argument(
        "--best_of",
        type=int,
        default=1,
        metavar="N",
        help="sample N texts, print the best (default: 1)",
    )
    parser.add_argument("--reward_model", metavar="DIR", help="reward model that rates the texts")
    parser.add_argument(
        "--no_cache", action="store_true", help="disable the key/value cache: slower, same text"
    )
    add_sampling_options(parser)
    add_model_options(parser)
    options = parser.parse_args(args)
    return run_command(
        "generate",
        lambda: _generate(options),
        checkpoint=options.checkpoint,
        option="--checkpoint",
    )


def _generate(options: argparse.Namespace) -> None:
    from torchtitan.components import generation
    from torchtitan.experiments.reward.rating import RewardModel

    if options.image:
        return _answer_about_images(options)
    if options.chat_template:
        raise UserError(
            "--chat_template is for prompts about an --image; text is continued as it is "
            "(conversations: torchtitan chat)"
        )
    sampling, n = sampling_of(options), options.best_of
    if n < 1 or (n > 1 and not (options.reward_model and sampling.temperature)):
        raise UserError(
            f"--best_of {n} needs a number above 0, --reward_model DIR and a --temperature above 0"
        )
    texts = [text for text in _prompts(options) for _ in range(n)]
    opened = open_model(options)
    rate = RewardModel(options.reward_model) if options.reward_model else None
    # BOS is added if the model is configured so, and replaces an empty text.
    prompts = [
        opened.tokenizer.encode(text, add_eos=False)
        if text
        else [generation.start_id(opened.tokenizer)]
        for text in texts
    ]
    printer = _Printer(opened, texts, prompts, options.stop, as_json=options.json)
    started = time.perf_counter()
    generations = generation.generate(
        opened.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop_ids=generation.continuation_stop_ids(opened.tokenizer, opened.folders),
        on_token=printer.on_token,
        use_cache=not options.no_cache,
    )
    ended = time.perf_counter()
    printer.finish(generations, n, rate)
    _report_speed(
        prompts, generations, (printer.first_token_time or ended) - started, ended - started
    )


def _answer_about_images(options: argparse.Namespace) -> None:
    """Answer each prompt about the images."""
    excluded = {
        "best_of": options.best_of != 1,
        "reward_model": options.reward_model is not None,
        "no_cache": options.no_cache,
    }
    for name, is_given in excluded.items():
        if is_given:
            raise UserError(f"--{name} cannot be combined with --image")
    if not options.prompt and options.prompt_file is None:
        raise UserError(
            "--image needs a question or instruction: --prompt TEXT, or --prompt '' for a model "
            "that is trained on images without one"
        )
    prompts = _prompts(options)
    options.module = options.module or "torchtitan.models.transformers"
    options.system = None
    options.chat_template_kwargs = "{}"
    conversation = _Conversation(options)
    for prompt in prompts:
        conversation.reset()
        for path in options.image:
            conversation.add_image(path)
        answer = conversation.answer(prompt, quietly=options.json)
        if options.json:
            images = [str(path) for path in options.image]
            line = {
                "prompt": prompt,
                "images": images,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "tokens": answer.tokens,
            }
            print(for_output(json.dumps(line, ensure_ascii=False)), flush=True)


def _prompts(options: argparse.Namespace) -> list[str]:
    texts: list[str] = list(options.prompt)
    if options.prompt_file is not None:
        with os_errors_as(f"--prompt_file {options.prompt_file} cannot be read"):
            texts.append(options.prompt_file.read_text(encoding="utf-8").removesuffix("\n"))
    return texts or [""]


class _Printer:
    def __init__(
        self,
        opened: OpenedModel,
        texts: list[str],
        prompts: list[list[int]],
        stop: list[str],
        *,
        as_json: bool,
    ):
        from torchtitan.components.generation import TextStream

        self.texts, self.as_json = texts, as_json
        self.streams = [TextStream(opened.tokenizer, prompt, stop) for prompt in prompts]
        self.live = len(texts) == 1 and not as_json
        self.first_token_time: float | None = None
        # Printed with the first token, after all checks.
        self.unprinted = texts[0]

    def on_token(self, row: int, token: int) -> bool:
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        piece = self.streams[row].push(token)
        if self.live:
            print(for_output(self.unprinted + piece), end="", flush=True)
            self.unprinted = ""
        return self.streams[row].stopped

    def finish(self, generations: "list[Generation]", n: int, rate: "RewardModel | None") -> None:
        """Print the rest, only the best of `n` texts at a time if there is a reward."""
        rests = [stream.finish() for stream in self.streams]
        rewards = [0.0] * len(self.texts)
        if rate:
            completions = [stream.text for stream in self.streams]
            rated = rate(self.texts, completions, [{"prompt": text} for text in self.texts])
            rewards = cast(list[float], rated)  # only answers about images may have none
        for first in range(0, len(rests), n):
            i = max(range(first, first + n), key=rewards.__getitem__)
            text = self.texts[i]
            stream = self.streams[i]
            generation = generations[i]
            rest = rests[i]
            reward = {"reward": rewards[i]} if rate else {}
            if self.live:
                print(for_output(self.unprinted + rest))
            elif self.as_json:
                reason = "stop" if stream.stopped else generation.finish_reason
                line = {
                    "prompt": text,
                    "text": stream.text,
                    "finish_reason": reason,
                    "tokens": generation.ids,
                }
                print(for_output(json.dumps(line | reward, ensure_ascii=False, allow_nan=False)))
            else:
                print(for_output(text + stream.text))
            if reward:
                print(f"reward: {rewards[i]:.4f}", file=sys.stderr)
        sys.stdout.flush()


def _report_speed(
    prompts: list[list[int]], generations: "list[Generation]", first_seconds: float, seconds: float
) -> None:
    """Report speeds. The pass over the prompt yields the first token; each later token takes
    another pass."""
    read, new = sum(map(len, prompts)), sum(len(generation.ids) for generation in generations)
    later = new - sum(1 for generation in generations if generation.ids)
    words = [f"prompt: {read} tokens, {read / first_seconds:,.0f} tokens/s"]
    if later > 0 and seconds > first_seconds:
        words.append(f"generated: {new} tokens, {later / (seconds - first_seconds):,.0f} tokens/s")
    print("; ".join(words), file=sys.stderr)


def chat(args: Sequence[str]) -> int:
    """Answer each line of standard input and return the exit code."""
    parser = Parser(
        prog="torchtitan chat",
        description="Chat with a model, using its chat template. Each line of standard input is a "
        "message; answers "
        "are streamed to standard output. /image PATH shows the model an image with the next "
        "message, /reset starts over, /exit or Ctrl-D ends.",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message at the start of the conversation"
    )
    add_chat_template_option(parser)
    parser.add_argument(
        "--chat_template_kwargs",
        default="{}",
        metavar="JSON",
        help="options of the chat template, such as '{\"enable_thinking\": false}' (default: none)",
    )
    add_sampling_options(parser)
    add_model_options(parser)
    options = parser.parse_args(args)
    return run_command(
        "chat",
        lambda: _chat(options),
        checkpoint=options.checkpoint,
        option="--checkpoint",
    )


def _chat(options: argparse.Namespace) -> None:
    conversation = _Conversation(options)
    for line in _lines():
        if line == "/exit":
            return
        try:
            if line == "/reset":
                conversation.reset()
            elif line.split(maxsplit=1)[:1] == ["/image"]:
                conversation.add_image(Path(line.removeprefix("/image").strip()))
            elif line:
                conversation.answer(line)
        except UserError as error:
            print_error("chat", error)


class _Answer(NamedTuple):
    text: str
    finish_reason: str
    tokens: list[int]


class _Conversation:
    def __init__(self, options: argparse.Namespace):
        from torchtitan.components.chat_template import resolve_chat_template
        from torchtitan.components.chat_template.stops import Stops
        from torchtitan.components.generation import stop_ids

        self._sampling = sampling_of(options)
        self._opened = opened = open_model(options)
        template, option = options.chat_template, "--chat_template"
        self._template = resolve_chat_template(
            template, opened.folders, opened.tokenizer, option=option
        )
        self._template_options = _template_options(options.chat_template_kwargs, self._template)
        stops = Stops(self._template, opened.tokenizer)
        self._stop_ids = stop_ids(opened.tokenizer, *opened.folders) | {*stops.ids()}
        self._stop = [*options.stop, *stops.texts()]
        self._max_new_tokens: int = options.max_new_tokens
        self._system = [{"role": "system", "content": options.system}] if options.system else []
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._system)
        self._images: list[ImageFile] = []
        self._n_shown = 0

    def add_image(self, path: Path) -> None:
        """Show the model an image with the next message. Raise `UserError` if it cannot be read, or
        the model reads text only."""
        self._images.append(self._image_prompts.open(path))

    @cached_property
    def _image_prompts(self) -> ImagePrompts:
        return ImagePrompts(self._opened)

    def answer(self, text: str, *, quietly: bool = False) -> _Answer:
        """Print the answer to `text`, or, `quietly`, only return it. Remember both turns. Raise
        `UserError` if another turn does not fit."""
        from torchtitan.components.generation import TextStream, generate

        messages = [*self._messages, message(text, len(self._images) - self._n_shown)]
        rendered = self._template.render(
            messages, add_generation_prompt=True, **self._template_options
        )
        prompt = self._opened.tokenizer.encode(
            rendered, add_bos=False, add_eos=False, allow_special=True
        )
        reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._images:
            prompt, reading = self._image_prompts.encode(prompt, self._images)
        context = self._opened.context
        if len(prompt) >= context:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, but the model's context has only "
                f"{context}; use /reset"
            )
        stream = TextStream(self._opened.tokenizer, prompt, self._stop)

        def on_token(row: int, token: int) -> bool:
            piece = stream.push(token)
            if not quietly:
                print(for_output(piece), end="", flush=True)
            return stream.stopped

        with reading:
            [generation] = generate(
                self._opened.model,
                [prompt],
                max_new_tokens=min(self._max_new_tokens, context - len(prompt)),
                sampling=self._sampling,
                stop_ids=self._stop_ids,
                on_token=on_token,
            )
        rest = stream.finish()
        if not quietly:
            print(for_output(rest), flush=True)
        self._messages = [*messages, {"role": "assistant", "content": stream.text}]
        self._n_shown = len(self._images)
        reason = "stop" if stream.stopped else generation.finish_reason
        return _Answer(stream.text, reason, generation.ids)


def _template_options(text: str, template: "ChatTemplate") -> dict[str, Any]:
    """Parse `--chat_template_kwargs`. Raise `UserError` if it is not a JSON object, or names an
    option that the template does not read."""
    options = parse_json(text, "--chat_template_kwargs")
    if not isinstance(options, dict):
        raise UserError(
            f'--chat_template_kwargs {text} must be a JSON object, such as \'{{"enable_thinking": '
            "false}'"
        )
    for name in options:
        if name not in template.option_names:
            known = ", ".join(template.option_names) or "none"
            raise UserError(
                f"--chat_template_kwargs: {template.name} does not read {name!r}, but {known}"
                + suggest(name, template.option_names)
            )
    return options


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    from rich.console import Console

    console = Console(stderr=True)
    console.print(
        "each line is a message; /image PATH shows an image with the next one, /reset starts over, "
        "/exit or Ctrl-D ends",
        style="dim",
    )
    while True:
        try:
            yield console.input("[bold]> [/bold]").strip()
        except EOFError:
            return
