"""`torchtitan eval`: evaluate a checkpoint's model."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.cli.image_prompts import ImagePrompts
from torchtitan.cli.model_options import (
    OpenedModel,
    add_chat_template_option,
    add_model_options,
    open_model,
    run_command,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.parser import Parser
from torchtitan.tools.redact import redacted

if TYPE_CHECKING:
    from torchtitan.components.chat_template import ChatTemplate
    from torchtitan.components.evaluation import Scorer
    from torchtitan.components.evaluation.image_questions import ImageQuestionScorer
    from torchtitan.components.evaluation.written_answers import AnswerWriter
    from torchtitan.components.images.processor import ImageProcessor


def evaluate(args: Sequence[str]) -> int:
    """Evaluate on the tasks and return the exit code. Print a table on standard error; print or
    write JSON."""
    parser = Parser(
        prog="torchtitan eval",
        description="Evaluate a model. A task is a file FILE.jsonl with multiple-choice questions "
        "(query, choices, gold) or questions that the model answers in its own words (query, "
        "answer), both also with image or images, a text FILE.txt or FILE.md (perplexity, bits "
        "per byte), or the name of an lm-eval task "
        "(pip install 'torchtitan[eval]'). Prints a table on standard error and JSON on standard "
        "output.",
    )
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="files or names of lm-eval tasks"
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="examples per task; does not apply to texts (default: all)",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=8,
        metavar="N",
        help="sequences per forward pass (default: 8)",
    )
    parser.add_argument(
        "--seq_len",
        type=int,
        metavar="N",
        help="tokens that the model sees at once, at most, for instance those of its training "
        "windows (default: its context)",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of an answer in the model's own words, at most (default: 128)",
    )
    add_chat_template_option(parser)
    parser.add_argument(
        "--include_path",
        type=Path,
        metavar="DIR",
        help="folder with lm-eval tasks in YAML, whose code is executed",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file for the JSON (default: standard output)"
    )
    add_model_options(parser)
    options = parser.parse_args(args)
    return run_command(
        "eval",
        lambda: _evaluate(options),
        checkpoint=options.checkpoint,
        option="--checkpoint",
    )


def _evaluate(options: argparse.Namespace) -> None:
    from torchtitan.components.evaluation import Scorer
    from torchtitan.components.evaluation.tasks import SUFFIXES, evaluate_file, mean_centered
    from torchtitan.components.generation import continuation_stop_ids
    from torchtitan.tools.logging import logger

    files = [task for task in options.tasks if Path(task).suffix in SUFFIXES]
    names = [task for task in options.tasks if task not in files]
    _check(options, files, names)
    tasks = None
    if names:
        from torchtitan.components.evaluation.lm_eval_adapter import HarnessTasks, TorchtitanLM

        tasks = HarnessTasks(names, options.include_path)
    kinds = [_kinds(Path(file), options.limit) for file in files]
    with_images = any(kind.has_images for kind in kinds)
    if with_images and not options.module:
        options.module = "torchtitan.models.transformers"
        logger.info("questions with images: the class of transformers computes all tasks")
    opened = open_model(options)
    config: Any = opened.model.config
    if (size := options.seq_len) is not None:
        most = config.max_seq_len
        require(1 <= size <= most, "--seq_len", size, f"from 1 to the model's context, {most}")
    scorer = Scorer(opened.model, batch_size=options.batch_size, max_seq_len=size)
    processor = ImagePrompts(opened).processor if with_images else None
    images = None
    answers = None
    if processor:
        images = _image_scorer(opened, scorer, processor, _template(opened, options))
    if any(kind.is_open for kind in kinds):
        answers = _answer_writer(opened, scorer, processor, options)
    results: dict[str, dict[str, Any]] = {}
    for file in files:
        scorer.title = Path(file).name
        results[file] = evaluate_file(
            Path(file), scorer, opened.tokenizer, options.limit, images=images, answers=answers
        )
    if tasks:
        scorer.title = "lm-eval"
        ids = continuation_stop_ids(opened.tokenizer, opened.folders)
        model = TorchtitanLM(scorer, opened.tokenizer, ids)
        results |= tasks.evaluate(model, options.limit)
    members = tasks.members if tasks else set()
    document = {"checkpoint": str(options.checkpoint), "results": results}
    _report({**document, **mean_centered(results, members)}, options.output)


class _Kinds(NamedTuple):
    """The kinds of questions in a file."""

    has_images: bool
    is_open: bool
    """The model answers in its own words."""


def _kinds(file: Path, limit: int | None) -> _Kinds:
    from torchtitan.components.evaluation.tasks import read_questions

    questions = read_questions(file, limit) if file.suffix == ".jsonl" else []
    return _Kinds(
        has_images=any(one.images for one in questions),
        is_open=any(not one.choices for one in questions),
    )


def _template(opened: OpenedModel, options: argparse.Namespace) -> "ChatTemplate":
    from torchtitan.components.chat_template import resolve_chat_template

    return resolve_chat_template(
        options.chat_template, opened.folders, opened.tokenizer, option="--chat_template"
    )


def _answer_writer(
    opened: OpenedModel,
    scorer: "Scorer",
    processor: "ImageProcessor | None",
    options: argparse.Namespace,
) -> "AnswerWriter":
    from torchtitan.components.evaluation.written_answers import AnswerWriter

    return AnswerWriter(
        scorer,
        opened.tokenizer,
        _template(opened, options),
        opened.folders,
        processor,
        max_new_tokens=options.max_new_tokens,
    )


def _image_scorer(
    opened: OpenedModel, scorer: "Scorer", processor: "ImageProcessor", template: "ChatTemplate"
) -> "ImageQuestionScorer":
    from torchtitan.components.evaluation.image_questions import ImageQuestionScorer

    return ImageQuestionScorer(scorer, opened.tokenizer, template, processor)


def _check(options: argparse.Namespace, files: list[str], names: list[str]) -> None:
    from torchtitan.components.evaluation.tasks import check_harness

    require(options.max_new_tokens >= 1, "--max_new_tokens", options.max_new_tokens, "at least 1")
    require(options.limit is None or options.limit >= 1, "--limit", options.limit, "at least 1")
    if missing := [file for file in files if not Path(file).is_file()]:
        raise UserError(f"file not found: {', '.join(missing)}")
    check_harness(names, options.include_path, "--include_path")
    if options.output is not None and not options.output.parent.is_dir():
        raise UserError(f"--output: the folder {options.output.parent} does not exist")
    if options.output is not None and options.output.is_dir():
        raise UserError(f"--output: {options.output} is a folder; name a file")


def _report(document: dict[str, Any], output: Path | None) -> None:
    from rich.console import Console

    from torchtitan.tools.tables import print_table

    # Save the results before anything else can fail.
    text = json.dumps(redacted(_finite(document)), indent=2, default=str, allow_nan=False)
    try:
        if output is not None:
            durable.write(output, text + "\n")
    except OSError as error:
        print(text, flush=True)
        reason = error.strerror or error
        raise UserError(
            f"--output {output} cannot be written ({reason}); the JSON was printed instead"
        ) from error
    if output is None:
        print(text, flush=True)
    rows = []
    shown = dict(document["results"])
    if "centered_accuracy" in document and len(shown) > 1:
        shown["mean of the tasks"] = {"centered_accuracy": document["centered_accuracy"]}
    for task, metrics in shown.items():
        for index, (name, value) in enumerate(metrics.items()):
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
            rows.append(("" if index else task, name, text))
    console = Console(stderr=True, markup=False, emoji=False)
    print_table(console, "", ("task", "metric", "value"), rows, numbers=("value",))


def _finite(value: object) -> object:
    """Replace numbers that JSON cannot represent, such as the perplexity of a hopeless model, with
    null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
