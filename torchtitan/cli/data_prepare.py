"""`torchtitan data prepare`: encode data ahead of a run, in parts on any number of processes and
hosts."""

import argparse
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.process import usable_cores

if TYPE_CHECKING:
    from torchtitan.components.data.prepare.classifier import Classifier
    from torchtitan.components.data.prepare.encoding import Encoding
    from torchtitan.components.data.prepare.near_duplicates import Bands
    from torchtitan.components.data.prepare.preparation import Preparation
    from torchtitan.components.data.sources.source import Source

_TOKEN_BYTES = 4
"""Bytes of text per token, to estimate a cost."""

DESCRIPTION = (
    "Encode text, chats or preferences into caches in a folder, which --dataloader.dataset reads. "
    "The work is divided into parts, each written completely or not at all: run the same command "
    "again to continue after an interruption."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; sources precede all of them."""
    parser.usage = f"{parser.prog} SOURCE... --out PLACE [options]"
    add = parser.add_argument
    add(
        "--dataloader.dataset",
        "--dataloader.weights",
        nargs="*",
        dest="of_run",
        help=argparse.SUPPRESS,
    )
    add("--out", metavar="PLACE", help="folder or URL (s3://…) of the result")
    add(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="processes (default: cores)",
    )
    add(
        "--part",
        metavar="I/N",
        help="write only the I-th of N shares of the parts, without merging",
    )
    add("--merge", action="store_true", help="only merge, after all shares are written")
    add(
        "--part_size",
        type=float,
        default=64.0,
        metavar="MB",
        help="MB per part of a JSON Lines file (default: 64)",
    )
    add(
        "--held_out",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction to keep for the split `validation`, by hash",
    )
    add(
        "--keep_duplicates", action="store_true", help="keep documents or samples with equal tokens"
    )
    add("--min_tokens", type=int, default=0, metavar="N", help="text: drop shorter documents")
    add("--max_tokens", type=int, metavar="N", help="text: drop longer documents")
    add(
        "--max_repetition",
        type=float,
        default=1.0,
        metavar="F",
        help="text: drop texts with more repeated 10-grams",
    )
    add(
        "--near_duplicates",
        type=float,
        metavar="S",
        help="text: drop documents whose 5-grams of tokens are similar to an earlier document's, "
        "from S, such as 0.8",
    )
    add(
        "--classify",
        nargs=2,
        metavar=("POSITIVE", "NEGATIVE"),
        help="text: score documents by a classifier of words, trained on two sources of examples",
    )
    add(
        "--keep_best",
        type=float,
        metavar="F",
        help="text: with --classify, keep this fraction of the documents, with the highest scores",
    )


COMPONENTS = ("dataloader", "tokenizer", "hf_assets_path")
"""Parts of a configuration that describe its data."""


def prepare(
    sources: Sequence[str], options: argparse.Namespace, config: Mapping[str, object]
) -> None:
    """Prepare `sources` as the data of a configuration, whose `COMPONENTS` are given. torch is not
    imported, since its import can take longer than the preparation."""
    from torchtitan.components.checkpoint.filesystem import folder_at
    from torchtitan.components.data.prepare.merge import merge
    from torchtitan.components.data.prepare.preparation import Preparation

    if options.of_run is not None:
        raise UserError(
            "--dataloader.dataset and --dataloader.weights belong to a run; begin with what to "
            "prepare"
        )
    if not options.out:
        raise UserError("--out is missing; set it to the folder or URL of the result")
    if options.part and options.merge:
        raise UserError("--part writes parts and --merge merges them; set one of them")
    require(options.workers >= 1, "--workers", options.workers, "at least 1")
    require(options.part_size > 0, "--part_size", options.part_size, "above 0")
    require(0 <= options.held_out < 1, "--held_out", options.held_out, "at least 0 and below 1")
    bands = _bands(options)
    share = re.fullmatch(r"(\d+)/(\d+)", options.part or "1/1")
    if share is None or not 1 <= int(share[1]) <= int(share[2]):
        raise UserError(
            f"--part is {options.part}, but must be I/N with I from 1 to N, such as 3/64"
        )
    open_sources, encoding, classifier = _open(sources, options, config)
    preparation = Preparation(
        open_sources=open_sources,
        place=folder_at(os.path.expanduser(options.out)),
        encoding=encoding,
        part_bytes=max(1, int(options.part_size * 1e6)),
        held_out=options.held_out,
        deduplicate=not options.keep_duplicates,
        near_duplicates=bands,
        keep_best=options.keep_best,
    )
    # Ignore SIGPIPE, so that a killed worker raises an error instead of ending this process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    if not options.merge:
        preparation.begin()
        _tell_cost(preparation, classifier, int(share[2]))
        numbers = [
            number
            for number in preparation.missing()
            if number % int(share[2]) == int(share[1]) - 1
        ]
        preparation.write_all(numbers, options.workers)
    if not options.part:
        merge(preparation, options.workers)


def _bands(options: argparse.Namespace) -> "Bands | None":
    """Return the search for near duplicates; check the options of scores."""
    from torchtitan.components.data.prepare.near_duplicates import Bands

    if options.keep_best is not None:
        require(0 < options.keep_best < 1, "--keep_best", options.keep_best, "above 0 and below 1")
        if not options.classify:
            raise UserError("--keep_best keeps the highest scores; add --classify, or leave it out")
    if options.near_duplicates is None:
        return None
    if options.keep_duplicates:
        raise UserError("--keep_duplicates keeps what --near_duplicates removes; set one of them")
    return Bands(options.near_duplicates)


def _classifier(examples: Sequence[str], loader: Any) -> "Classifier":
    """Train the classifier of --classify, and print its quality."""
    from torchtitan.components.data.prepare.classifier import train_classifier
    from torchtitan.components.data.sources.source import Source

    found = [loader.source(name) for name in examples]
    for name, source in zip(examples, found, strict=True):
        if not isinstance(source, Source):
            raise UserError(f"--classify: {name} is a stream; download it, and name the files")
    classifier = train_classifier(*found)
    measured = classifier.measured
    logger.info(
        f"classifier: on {measured.examples:,} examples that it was not trained on, "
        f"{measured.accuracy:.1%} right, and {measured.ranked:.1%} of the pairs of a positive and "
        "a negative one in this order"
    )
    if measured.ranked <= measured.by_chance:
        logger.warning(
            f"--classify: the order may be chance: the scores do not tell {examples[0]} from "
            f"{examples[1]}; give other or more examples"
        )
    return classifier


def _tell_cost(preparation: "Preparation", classifier: "Classifier | None", shares: int) -> None:
    """Log what optional steps of a share take, before they start."""
    parts = [part for _, part in preparation.parts]
    n_bytes, amount = 1e6, "each MB of text"  # of tables, whose rows have unknown lengths
    if all(part.counts_bytes for part in parts):
        n_bytes = sum(part.size() for part in parts) / shares
        amount = f"{n_bytes / 1e6:,.1f} MB"
    costs = {}
    if classifier:
        costs["scores"] = classifier.measured.seconds_per_byte
    if preparation.near_duplicates:
        costs["near duplicates"] = preparation.near_duplicates.seconds_per_token() / _TOKEN_BYTES
    for name, seconds in costs.items():
        logger.info(f"{name}: about {n_bytes * seconds:,.1f} processor seconds for {amount}")
    if bands := preparation.near_duplicates:
        found = ", ".join(f"{bands.probability(s):.0%} at {s}" for s in (0.5, 0.6, 0.7, 0.8, 0.9))
        logger.info(
            f"near duplicates: {bands.n_bands} bands of {bands.n_rows} hashes find {found}; "
            f"{8 * bands.n_bands} bytes per document until the merge ends"
        )


def _open(
    sources: Sequence[str], options: argparse.Namespace, config: Mapping[str, Any]
) -> "tuple[Callable[[], Sequence[Source]], Encoding, Classifier | None]":
    """Return a function that lists the sources, their encoding according to the data loader, and
    the classifier of its documents."""
    from torchtitan.components.data.dataloader import PretrainDataLoader
    from torchtitan.components.data.finetuning.filters import FilterConfig
    from torchtitan.components.data.finetuning.planned_loader import PlannedDataLoader
    from torchtitan.components.data.prepare.encoding import document_encoding, sample_encoding
    from torchtitan.components.data.prepare.prepared import find_prepared
    from torchtitan.components.data.sources.source import CHAT_DATASETS, DOCUMENTS, Source

    loader = config["dataloader"]
    if not isinstance(loader, PlannedDataLoader.Config | PretrainDataLoader.Config):
        raise UserError(
            f"{type(loader).__qualname__} reads its data in its own way, which cannot be prepared"
        )
    if isinstance(loader, PlannedDataLoader.Config) and loader.has_images:
        raise UserError(
            "data with images cannot be prepared: the result would not contain the images; train "
            "on the data itself"
        )
    tokenizer = config["tokenizer"].build(path=config["hf_assets_path"])
    filters = FilterConfig(
        **{name: getattr(options, name) for name in ("min_tokens", "max_tokens", "max_repetition")}
    )
    loader.dataset = list(sources)
    catalog: Any = CHAT_DATASETS
    if isinstance(loader, PretrainDataLoader.Config):
        loader.weights, catalog = [], DOCUMENTS  # the weights belong to the datasets of the run
    else:
        loader.stream = "none"  # prepared rows are copies
    loader.validate()
    for source in sources:
        if find_prepared(source, catalog):
            raise UserError(f"{source} is prepared data; name what it was made of")

    def open_sources() -> list[Source]:
        opened: list[Any] = [loader.source(source) for source in sources]
        if not all(isinstance(source, Source) for source in opened):
            raise UserError(
                "registered datasets are streamed; prepare their files: a path or a URL"
            )
        return opened

    if isinstance(loader, PretrainDataLoader.Config):
        classifier = _classifier(options.classify, loader) if options.classify else None
        return open_sources, document_encoding(tokenizer, filters, classifier), classifier
    if filters != FilterConfig():
        raise UserError(
            "--min_tokens, --max_tokens and --max_repetition filter text; set --dataloader.… "
            "instead"
        )
    for name in ("near_duplicates", "classify"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for text; this configuration reads fine-tuning rows")
    formats = {source.name: row_format for source, row_format in loader.rows()}
    encoder = loader.encoder(tokenizer, loader.find_template(tokenizer))
    return open_sources, sample_encoding(formats, encoder, loader.filters()), None
