"""`torchtitan data`: prepare a run's data, inspect it before training, or show it step by step
afterwards."""

import argparse
import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.cli import data_prepare
from torchtitan.cli.model_options import run_command
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, os_errors_as, require
from torchtitan.tools.files import json_lines
from torchtitan.tools.logging import logger, presentable, print_error, without_logs
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.components.data.base import BaseDataLoader, Batch
    from torchtitan.components.data.report import DataSummary
    from torchtitan.components.tokenizer import Tokenizer
    from torchtitan.config import ParallelismConfig
    from torchtitan.config.manager import ResolvedConfig
    from torchtitan.trainer import Trainer
    from torchtitan.trainer.data_progress import DataProgress

_DESCRIPTIONS = {
    "prepare": data_prepare.DESCRIPTION,
    "inspect": "Show the training data of a configuration: counts, lengths, dropped rows with "
    "reasons, and the first "
    "windows with trained tokens marked. No model is built.",
    "show": "Show the documents of a training step with trained tokens marked. They come from the "
    "run's ledger "
    "(--debug.ledger) or, without a ledger, from the configuration and its seed.",
}

_ALSO = "All options of `torchtitan train` are also accepted."


def data(args: Sequence[str]) -> int:
    """Run the named subcommand and return the exit code, 2 for a user's mistake."""
    command, *words = args or ["--help"]
    if command in ("-h", "--help"):
        print("usage: torchtitan data prepare|inspect|show [options]\n")
        for name, text in _DESCRIPTIONS.items():
            print(f"  {name:<9} {text.partition('. ')[0]}")
        print(f"\n{_ALSO}")
        return 0
    if command not in _DESCRIPTIONS:
        print_error("data", f"unknown command '{command}' (there are: {', '.join(_DESCRIPTIONS)})")
        return 2
    return run_command(f"data {command}", lambda: _parse_and_run(command, words))


def _parse_and_run(command: str, args: Sequence[str]) -> None:
    from torchtitan.config.manager import ConfigManager

    parser = Parser(
        f"torchtitan data {command}",
        description=_DESCRIPTIONS[command],
        allow_abbrev=False,
        add_help=False,
    )
    parser.epilog = _ALSO
    if command == "inspect":
        parser.add_argument(
            "--samples", type=int, default=5, metavar="N", help="windows to show (default: 5)"
        )
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="also write an HTML page with all tokens"
        )
    elif command == "prepare":
        data_prepare.add_options(parser)
    else:
        parser.add_argument("--step", type=int, metavar="N", help="number of the step, from 1")
    sources = list(
        itertools.takewhile(
            lambda word: not word.startswith("-"), args if command == "prepare" else ()
        )
    )
    options, others = parser.parse_known_args(args[len(sources) :])
    if {"-h", "--help"} & set(others):
        print(parser.format_help(), flush=True)
    elif command == "prepare" and not sources:
        raise UserError(
            "no source is given; begin with files, folders, patterns or URLs: data prepare SOURCE…"
        )
    own_options = re.findall(r"^  --(\w+)", parser.format_help(), re.MULTILINE)
    manager = ConfigManager(parser.prog, own_options)
    if command == "prepare":
        components = manager.parse_components(others, data_prepare.COMPONENTS)
        data_prepare.prepare(sources, options, components)
    else:
        (_inspect if command == "inspect" else _show)(options, manager.parse_args(others))


class _Run(NamedTuple):
    """The configuration of a run's data."""

    config: "Trainer.Config"
    tokenizer: "Tokenizer"
    samples_per_step: int

    @classmethod
    def of(cls, config: "Trainer.Config") -> "_Run":
        """Check the configuration that the data depends on, and tokenize the data if needed."""
        for component in (config.tokenizer, config.dataloader, config.training, config.debug):
            component.validate()
        samples_per_step = config.training.resolve_global_batch_size(
            _data_parallel_degree(config.parallelism)
        )
        tokenizer = config.tokenizer.build(path=config.hf_assets_path)
        config.dataloader.prepare(tokenizer=tokenizer)
        return cls(config, tokenizer, samples_per_step)

    @contextmanager
    def loader(self, n_samples: int, *, place: int = 0) -> "Iterator[BaseDataLoader]":
        """Yield a loader of batches of `n_samples` in the run's order; it reads as rank `place`, so
        its first batch is batch `place`."""
        from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader

        config, dataloader = self.config, self.config.dataloader
        if isinstance(dataloader, PlannedDataLoader.Config):
            # same order, no prefetching
            dataloader = dataclasses.replace(dataloader, num_workers=0)
        with without_logs(logging.INFO):  # the tables replace the loader's log
            loader = dataloader.build(
                tokenizer=self.tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=n_samples,
                dp_rank=place,
                dp_world_size=place + 1,
                seed=config.debug.seed,
                epochs=config.training.epochs,
                global_batch_size=self.samples_per_step,
            )
        with closing(loader):
            yield loader

    def length(self, n_samples: int | None) -> "DataProgress":
        return self.config.data_progress(self.samples_per_step, n_samples)


def _data_parallel_degree(parallelism: "ParallelismConfig") -> int:
    """Return the number of ranks that read different samples, out of `NGPU` x `NNODES` processes,
    or more if the configured degrees need more."""
    import torch

    from torchtitan.cli.launch import environment_number
    from torchtitan.distributed import ParallelDims

    processes = environment_number("NNODES")
    processes *= environment_number("NGPU", default=max(1, torch.cuda.device_count()))
    others = [
        getattr(parallelism, f"{kind}_parallel_degree")
        for kind in ("context", "tensor", "pipeline")
    ]
    copies = parallelism.data_parallel_replicate_degree * max(
        1, parallelism.data_parallel_shard_degree
    )
    return ParallelDims.from_config(
        parallelism, max(processes, copies * math.prod(others))
    ).dp_degree


def _inspect(options: argparse.Namespace, resolved: "ResolvedConfig") -> None:
    from torchtitan.cli.data_report import Inspection, page, print_inspection
    from torchtitan.cli.data_samples import Sample, samples_of
    from torchtitan.tools.tables import open_console

    require(options.samples >= 1, "--samples", options.samples, "at least 1")
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise UserError(f"--html: there is no folder {options.html.absolute().parent}")
    if options.html is not None and options.html.exists() and not options.html.is_file():
        raise UserError(
            f"--html: {options.html} is not a regular file, which the page could replace"
        )
    run = _Run.of(resolved.config)
    with run.loader(1) as loader:
        length = run.length(loader.n_samples)
        n_steps = length.last_step(0)
        n_samples = length.samples_read_at(n_steps, 0)
        summary, refusal = loader.summary(n_samples), ""
        try:
            loader.check_repetitions(n_samples)
        except UserError as error:  # training would raise it too
            refusal = str(error)
        # Show no sample twice: small datasets repeat.
        n_shown = min(options.samples, summary.windows_per_epoch) if summary else options.samples
        samples: list[Sample] = []
        with suppress(UserError) if refusal else nullcontext():
            for batch in itertools.islice(loader, n_shown):
                samples += samples_of(batch, loader, run.tokenizer)
        inspection = Inspection(
            title=f"Data of {resolved.module} {resolved.config_name}",
            facts=_facts(run, n_steps, summary),
            summary=summary,
            samples=samples,
            refusal=refusal,
        )
    print_inspection(open_console(), inspection)
    if options.html is not None:
        with os_errors_as(f"--html {options.html} cannot be written"):
            durable.write(options.html.resolve(), page(inspection))
        print(presentable(f"\nwritten to {options.html}"))


def _facts(run: _Run, n_steps: int, summary: "DataSummary | None") -> list[tuple[str, str]]:
    training, windows = run.config.training, _counted(run.samples_per_step, "window")
    windows += "".join(f", {change}" for change in training.batch_schedule)
    lengths = "".join(f", {change}" for change in training.seq_len_schedule)
    facts = [
        (
            "tokenizer",
            f"{run.config.hf_assets_path or 'embedded'}, {run.tokenizer.vocab_size:,} tokens",
        ),
        (
            "the run",
            f"{_counted(n_steps, 'step')}, {windows} of {training.seq_len:,}{lengths} tokens in "
            "each",
        ),
    ]
    if summary is None:
        return [
            *facts,
            (
                "the data",
                f"unknown to {run.config.dataloader._owner.__qualname__} before it is read",
            ),
        ]
    trained = sum(of_set.report.trained_tokens for of_set in summary.sets)
    tokens = sum(of_set.report.tokens for of_set in summary.sets)
    facts += [
        (
            "tokens",
            f"{tokens:,}, of which {trained:,} ({trained / max(1, tokens):.1%}) are trained",
        ),
        ("windows per epoch", f"{summary.windows_per_epoch:,}"),
        ("steps per epoch", f"{math.ceil(summary.windows_per_epoch / run.samples_per_step):,}"),
    ]
    if summary.packing_efficiency is not None:
        facts.append(
            ("packing efficiency", f"{summary.packing_efficiency:.1%} of all positions hold data")
        )
    return facts


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _show(options: argparse.Namespace, resolved: "ResolvedConfig") -> None:
    from torchtitan.cli.data_report import print_samples
    from torchtitan.cli.data_samples import samples_of
    from torchtitan.tools.tables import open_console

    if options.step is None:
        raise UserError("no step is selected; set --step to the number of a step, from 1")
    require(options.step >= 1, "--step", options.step, "the number of a step, from 1")
    path = Path(resolved.config.dump_folder) / "ledger.jsonl"
    line = _ledger_line(path, options.step) if path.is_file() else None
    run = _Run.of(resolved.config)
    data_step = line["data_step"] if line else run.length(None).data_steps(options.step)
    with run.loader(run.samples_per_step, place=data_step - 1) as loader:
        names = line["documents"] if line else []
        named = loader.batch_of(names) if line else None
        if line:
            batch = named or _expected(run, loader, options.step, names)
        else:
            batch = _planned(run, loader, options.step)
        samples = samples_of(batch, loader, run.tokenizer) if batch is not None else []
    source = path if line else f"the configuration and its seed (there is no {path})"
    print(presentable(f"step {options.step}, according to {source}:"))
    if samples:
        print_samples(open_console(), samples, in_windows=named is None)
    else:
        print("\n".join(map(presentable, names)))


def _ledger_line(path: Path, step: int) -> dict[str, Any]:
    """Return a step's ledger entry. Raise `UserError` if it is missing."""
    steps: list[int] = []
    damaged: list[int] = []
    for line in json_lines(path, _is_ledger_entry, damaged):
        if line["step"] == step:
            return line
        steps = [*steps[:1], line["step"]]
    known = f"has the steps {steps[0]} to {steps[-1]}" if steps else "has no steps"
    unread = f", and line {damaged[0]} of it is damaged" if damaged else ""
    raise UserError(f"there is no step {step}: '{path}' {known}{unread}")


def _is_ledger_entry(line: dict[str, object]) -> bool:
    match line:
        case {"step": int(), "data_step": int(data_step), "documents": [*names]}:
            return 1 <= data_step < 2**63 and all(isinstance(name, str) for name in names)
    return False


def _planned(run: _Run, loader: "BaseDataLoader", step: int) -> "Batch":
    """Return the step's samples according to the configuration: the loader's first batch. Raise
    `UserError` if they depend on training, or the run ends before the step."""
    from torchtitan.components.data.base import NO_DOCUMENT

    if run.config.training.batch_schedule or run.config.training.seq_len_schedule:
        raise UserError(
            f"step {step} of a run whose batches change is known only to a --debug.ledger"
        )
    summary = loader.summary(0)
    if summary is None or not summary.follows_seed:
        raise UserError(
            f"the documents of step {step} depend on training; run with --debug.ledger to record "
            "them"
        )
    n_steps = run.length(loader.n_samples).last_step(0)
    if step > n_steps:
        raise UserError(f"there is no step {step}: the run has {n_steps:,}")
    batch = next(loader, None)
    if batch is None or (batch["documents"][:, 0] == NO_DOCUMENT).all():
        raise UserError(f"there is no step {step}: the data ends before it")
    return batch


def _expected(run: _Run, loader: "BaseDataLoader", step: int, names: list[str]) -> "Batch | None":
    """Return the samples according to the configuration if they have these names; names may be
    ambiguous."""
    from torchtitan.trainer.ledger import names_of

    training, summary = run.config.training, loader.summary(0)
    if (
        training.batch_schedule
        or training.seq_len_schedule
        or summary is None
        or not summary.follows_seed
    ):
        return None
    planned = _planned(run, loader, step)
    if names_of([planned], loader.document_names) == [names]:
        return planned
    logger.warning(
        f"step {step} has different documents according to the configuration, with "
        f"{run.samples_per_step} windows per step (set NGPU to the run's number of processes); "
        "showing only the names"
    )
    return None
