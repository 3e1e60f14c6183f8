"""`torchtitan migrate`: rewrite a configuration of another library as ours."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from torchtitan.cli.model_options import run_command
from torchtitan.config.migration.migrate import migrated
from torchtitan.config.migration.outcome import OUTCOMES, Migration
from torchtitan.config.migration.reading import KINDS, read_command, read_foreign
from torchtitan.config.migration.trl import METHODS
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

_DESCRIPTION = """Rewrite a configuration of another library as a file for --config_file, and list
what became of each value. FILE is a recipe of torchtune (YAML), a file of torchtitan (TOML, or a
config_registry.py), axolotl, LLaMA-Factory, litgpt (YAML), TRL or transformers (YAML, JSON), or a
shell script with a command; a command line may also follow --."""


def migrate(args: Sequence[str]) -> int:
    """Migrate the named file, or the command line after `--`. Return 0, or 2 for a mistake."""
    words = list(args)
    place = words.index("--") if "--" in words else len(words)
    command = words[place + 1 :]
    parser = Parser(prog="torchtitan migrate", description=_DESCRIPTION)
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="file to migrate")
    parser.add_argument("--out", type=Path, metavar="config.yaml", help="file to write")
    parser.add_argument(
        "--from", dest="kind", choices=KINDS, default="", help="library (default: by the names)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=None,
        help="processes that the run had, which multiply the batch of its file (default: those "
        "that its command starts, or 1)",
    )
    parser.add_argument(
        "--method", choices=METHODS, default="", help="TRL's trainer (default: by the names)"
    )
    parser.add_argument(
        "--config", default="", metavar="NAME", help="function of a config_registry.py"
    )
    options, others = parser.parse_known_args(words[:place])
    if others:
        _answer(parser, others)
    return run_command("migrate", lambda: _migrate(options, command))


def _answer(parser: Parser, others: Sequence[str]) -> NoReturn:
    """Report unrecognized arguments."""
    name = others[0].partition("=")[0]
    if name in ("--config_file", "--file", "--recipe"):
        parser.error(f"unrecognized argument {name}; the file needs no option before it")
    if name in ("--output", "--output_dir", "-o"):
        parser.error(f"unrecognized argument {name}; use --out")
    if name.startswith("--"):
        meant = suggest(name, re.findall(r"--[\w-]+", parser.format_usage()), cutoff=0.75)
        parser.error(f"unrecognized argument {name}{meant or '; set values of the file in it'}")
    parser.error(f"unrecognized argument {name}; one FILE is read, and written to --out")


def _migrate(options: argparse.Namespace, command: Sequence[str]) -> None:
    if (options.file is None) == (not command):
        raise UserError("name a FILE, or write a command line after --")
    if options.devices is not None and options.devices < 1:
        raise UserError(f"--devices is {options.devices}, but must be at least 1")
    foreign = (
        read_foreign(options.file, options.kind, options.config)
        if options.file
        else read_command(command, options.kind)
    )
    migration = migrated(foreign, devices=options.devices or 0, method=options.method)
    text = yaml.safe_dump(migration.document(), sort_keys=False, allow_unicode=True)
    print(presentable(_table(migration)))
    if options.out is not None and options.out.exists():
        raise UserError(f"--out {options.out} exists; choose another name, or remove it")
    out = options.out or Path("config.yaml")
    if options.out is None:
        print(f"\n{presentable(text)}")
    else:
        durable.write(options.out, f"# by torchtitan migrate, from {foreign.kind}\n{text}")
    run = f"torchtitan train --config_file {shlex.quote(str(out))}"
    print(presentable("\n  ".join(["\nTo run it:", *migration.commands, run])))


def _table(migration: Migration) -> str:
    """Return the rows by outcome, with keys in a column."""
    width = max((len(row.key) for row in migration.rows), default=0)
    lines = []
    for outcome in OUTCOMES:
        rows = [row for row in migration.rows if row.outcome == outcome]
        if rows:
            lines += ["", f"{outcome} ({len(rows)})"]
            lines += [
                f"  {row.key:<{width}}  {row.value} -> {row.note}".rstrip(" >-") for row in rows
            ]
    return "\n".join(lines[1:])
