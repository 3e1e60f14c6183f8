"""`torchtitan tokenizer train`: train a tokenizer on the user's data, compare it with others."""

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.cli.model_options import run_command
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, os_errors_as, require
from torchtitan.tools.logging import presentable, print_error
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from torchtitan.components.tokenizer import Tokenizer

    Named = tuple[str, Tokenizer]

_COMMANDS = ("train",)

_SAMPLE = 2**22
"""Bytes of each source on which tokenizers are compared, at most."""

_SPECIAL = re.compile(r"<\|\w+\|>")
"""Special tokens in the text of a chat template."""


def tokenizer(args: Sequence[str]) -> int:
    """Run the named subcommand and return the exit code, 2 for a user's mistake."""
    command, *words = args or ["--help"]
    if command in ("-h", "--help"):
        print("usage: torchtitan tokenizer train DATA... --vocab_size N --out DIR [options]")
        return 0
    if command not in _COMMANDS:
        print_error("tokenizer", f"unknown command '{command}' (there are: train)")
        return 2
    parser = Parser(
        prog="torchtitan tokenizer train",
        description="Train a byte-level BPE tokenizer, and print bytes per token by source.",
    )
    add = parser.add_argument
    add("data", nargs="+", metavar="DATA", help="text, as in --dataloader.dataset; each a source")
    add("--vocab_size", type=int, required=True, metavar="N", help="tokens, with special ones")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder of the tokenizer")
    add("--text_column", metavar="NAME", help="column of tables with the text (default: text)")
    add(
        "--special_tokens",
        nargs="*",
        default=[],
        metavar="TOKEN",
        help="further special tokens, next to begin, end and padding",
    )
    add(
        "--digits",
        type=int,
        default=3,
        metavar="N",
        help="digits of a number that a token may have (default: 3); small models calculate better "
        "with 1",
    )
    add(
        "--chat_template",
        default="",
        metavar="NAME|FILE",
        help="chatml, llama3, mistral, alpaca, or a Jinja file, whose special tokens are added",
    )
    add(
        "--max_bytes",
        type=float,
        default=2e9,
        metavar="N",
        help="train on at most this much, taken evenly from all data (default: 2e9)",
    )
    add(
        "--compare",
        nargs="*",
        type=Path,
        default=[],
        metavar="DIR",
        help="folders of other tokenizers to compare with",
    )
    options = parser.parse_args(words)
    return run_command("tokenizer train", lambda: _train(options))


class Pieces:
    """The text of a source in pieces: rows of tables, parts of text files."""

    def __init__(self, name: str, text_column: str | None):
        from torchtitan.components.data.sources.source import Source, resolve_source

        source = resolve_source(name, text_column)
        if not isinstance(source, Source):
            raise UserError(f"{name} is a stream; download it, and name the files")
        self.name, self._source = name, source

    @property
    def n_bytes(self) -> int:
        """Size on disk."""
        return self._source.size()

    def taken(self, share: float) -> Iterator[str]:
        """Yield a share of the pieces, evenly spaced."""
        from torchtitan.components.data.sources.rows import evenly

        return evenly((text for document in self._source.documents() for text in document), share)


_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


class _Row(NamedTuple):
    """Bytes per token of a source, by tokenizer."""

    source: str
    n_bytes: int
    ratios: list[float]


def _train(options: argparse.Namespace) -> None:
    from torchtitan.components.tokenizer.training import (
        save_tokenizer,
        tokenizer_files,
        train_tokenizer,
    )

    require(options.max_bytes > 0, "--max_bytes", options.max_bytes, "above 0")
    require(1 <= options.digits <= 100, "--digits", options.digits, "from 1 to 100")
    earlier = _files_in(options.out)
    template, special = _template(options.chat_template)
    sources = [Pieces(name, options.text_column) for name in options.data]
    others = [_opened(folder) for folder in options.compare]
    share = min(1.0, options.max_bytes / max(1, sum(source.n_bytes for source in sources)))
    texts = (text for source in sources for text in source.taken(share))
    first = list(islice(texts, 1))
    if not first and share < 1:
        raise UserError(
            f"--max_bytes {options.max_bytes:g} is less than one row, or part of a text file, of "
            "the data; raise it"
        )
    special += options.special_tokens
    trained = train_tokenizer(
        chain(first, texts), options.vocab_size, special, digits=options.digits
    )
    files = tokenizer_files(trained, template)
    if any(text != files.get(name) for name, text in earlier.items()):
        raise UserError(f"--out '{options.out}' has another tokenizer; name a new folder")
    with os_errors_as(f"--out '{options.out}' cannot be written"):
        save_tokenizer(files, options.out)
    if (size := trained.get_vocab_size()) < options.vocab_size:
        print(f"the data gives only {size:,} of {options.vocab_size:,} tokens")
    if share < 1:
        print(f"trained on {share:.1%} of the data (--max_bytes {options.max_bytes:g})")
    tokenizers = [_opened(options.out), *others]
    _print([_compared(source, tokenizers) for source in sources], tokenizers)
    print(presentable(f"{options.out}: --hf_assets_path {options.out} trains a model with it"))


def _files_in(folder: Path) -> dict[str, str]:
    """Return the tokenizer files in a folder: a killed command, which may be repeated, leaves some.
    Return no files if the folder does not exist. Raise `UserError` if it has other files."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise UserError(f"--out '{folder}' is a file; name a new folder")
    paths = [path for path in folder.iterdir() if not path.name.endswith(durable.SUFFIX)]
    if not {path.name for path in paths} <= _FILES:
        raise UserError(f"--out '{folder}' is not empty; name a new folder")
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _template(choice: str) -> tuple[str, list[str]]:
    """Return the text of a chat template and its special tokens. Raise `UserError` for an unknown
    one."""
    from torchtitan.components.chat_template.built_in import BUILT_IN_TEMPLATES, REQUIRED_TOKENS
    from torchtitan.components.chat_template.template import read_template

    if not choice:
        return "", []
    text = BUILT_IN_TEMPLATES.get(choice) or read_template(Path(choice), "--chat_template")
    return text, [*_SPECIAL.findall(text), *REQUIRED_TOKENS.get(choice, ())]


def _opened(folder: Path) -> "Named":
    from torchtitan.components.tokenizer import PretrainedTokenizer

    return folder.resolve().name, PretrainedTokenizer.Config().build(path=folder)


def _compared(source: Pieces, tokenizers: "Sequence[Named]") -> _Row:
    """Count the tokens of a sample of a source."""
    texts = list(source.taken(min(1.0, _SAMPLE / max(1, source.n_bytes))))
    n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    ratios = []
    for _, one in tokenizers:
        encoded = one.tokenize(texts, allow_special=False)
        ratios.append(n_bytes / max(1, sum(map(len, encoded))))
    return _Row(source.name, n_bytes, ratios)


def _print(rows: Sequence[_Row], tokenizers: "Sequence[Named]") -> None:
    from torchtitan.tools.tables import open_console, print_table

    names = [f"{name} ({one.vocab_size:,})" for name, one in tokenizers]
    columns = ["source", "bytes", *names]
    cells = [
        [row.source, f"{row.n_bytes:,}", *(f"{ratio:.3f}" for ratio in row.ratios)] for row in rows
    ]
    print_table(open_console(), "Bytes per token", columns, cells, columns[1:])
