"""`torchtitan generate`: continues text with a checkpoint's model."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
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
from torchtitan.tools.logging import for_output

if TYPE_CHECKING:
    from torchtitan.components.generation import Generation


def generate(args: Sequence[str]) -> int:
    """Continue the prompts that the command line gives; the exit code.

    Standard output gets each prompt with its continuation and a newline, or a JSON object per prompt, and nothing else.
    """
    parser = argparse.ArgumentParser(
        prog="torchtitan generate",
        description="Continue text with a model. Each prompt is printed with its continuation, a single one as it "
        "comes. Speed is reported on standard error.",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be given several times"
    )
    parser.add_argument(
        "--prompt_file",
        type=Path,
        metavar="FILE",
        help="a file whose text, without a newline at its end, is one more prompt",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON per prompt: prompt, text, finish_reason, tokens"
    )
    parser.add_argument("--no_cache", action="store_true", help="keep no keys and values: slower, the same text")
    add_sampling_options(parser)
    add_model_options(parser)
    options = parser.parse_args(args)
    return run_command("generate", lambda: _generate(options))


def _generate(options: argparse.Namespace) -> None:
    from torchtitan.components import generation

    sampling, texts = sampling_of(options), _prompts(options)
    opened = open_model(options)
    prompts = [encode_prompt(opened, text) for text in texts]
    printer = _Printer(opened, texts, prompts, options.stop, as_json=options.json)
    started = time.perf_counter()
    generations = generation.generate(
        opened.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop_ids=generation.stop_ids(opened.tokenizer, *opened.folders),
        on_token=printer.on_token,
        use_cache=not options.no_cache,
    )
    ended = time.perf_counter()
    printer.finish(generations)
    _report_speed(prompts, generations, (printer.first_token_time or ended) - started, ended - started)


def encode_prompt(opened: OpenedModel, text: str) -> list[int]:
    """Token ids to continue: BOS in front as the model's own configuration says, and of an empty text BOS alone."""
    from torchtitan.components.generation import start_id

    return opened.tokenizer.encode(text, add_eos=False) if text else [start_id(opened.tokenizer)]


class _Printer:
    """Decodes all rows, and prints a single one as it comes."""

    def __init__(
        self, opened: OpenedModel, texts: list[str], prompts: list[list[int]], stop: list[str], *, as_json: bool
    ):
        from torchtitan.components.generation import TextStream

        self.texts, self.as_json = texts, as_json
        self.streams = [TextStream(opened.tokenizer, prompt, stop) for prompt in prompts]
        self.live = len(texts) == 1 and not as_json
        self.first_token_time: float | None = None
        # With the first token: before it, the request may turn out to be a mistake, which has no answer.
        self.unprinted = texts[0]

    def on_token(self, row: int, token: int) -> bool:
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        piece = self.streams[row].push(token)
        if self.live:
            print(for_output(self.unprinted + piece), end="", flush=True)
            self.unprinted = ""
        return self.streams[row].stopped

    def finish(self, generations: "list[Generation]") -> None:
        for text, stream, generation in zip(self.texts, self.streams, generations, strict=True):
            rest = stream.finish()
            if self.live:
                print(for_output(self.unprinted + rest))
            elif self.as_json:
                reason = "stop" if stream.stopped else generation.finish_reason
                line = {"prompt": text, "text": stream.text, "finish_reason": reason, "tokens": generation.ids}
                print(for_output(json.dumps(line, ensure_ascii=False, allow_nan=False)))
            else:
                print(for_output(text + stream.text))
        sys.stdout.flush()


def _prompts(options: argparse.Namespace) -> list[str]:
    texts: list[str] = list(options.prompt)
    if options.prompt_file is not None:
        try:
            texts.append(options.prompt_file.read_text(encoding="utf-8").removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt_file {options.prompt_file} cannot be read: {error}") from error
    return texts or [""]


def _report_speed(
    prompts: list[list[int]], generations: "list[Generation]", first_seconds: float, seconds: float
) -> None:
    """The first token of each prompt comes with the prompt's own pass; the later ones each with another."""
    read, new = sum(map(len, prompts)), sum(len(generation.ids) for generation in generations)
    later = new - sum(1 for generation in generations if generation.ids)
    words = [f"prompt: {read} tokens, {read / first_seconds:,.0f} tokens/s"]
    if later > 0 and seconds > first_seconds:
        words.append(f"generated: {new} tokens, {later / (seconds - first_seconds):,.0f} tokens/s")
    print("; ".join(words), file=sys.stderr)
