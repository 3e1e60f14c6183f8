"""`torchtitan new`: copy an experiment or a plain training loop out of the library for editing."""

import argparse
import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.registry import built_in_modules
from torchtitan.tools.logging import print_error

_PACKAGE = Path(__file__).resolve().parent.parent
_EXPERIMENT = _PACKAGE / "experiments" / "template"
_PLAIN_LOOP = Path(__file__).resolve().parent / "templates" / "plain_loop.py"


def new(args: Sequence[str]) -> int:
    """Copy the requested template and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchtitan new",
        description="Start an experiment of your own: a folder with the training step written out, ready to run.",
    )
    parser.add_argument("path", type=Path, help="folder of the experiment, or the script's file with --plain-loop")
    parser.add_argument(
        "--plain-loop",
        action="store_true",
        help="one script instead: the same training with torchtitan's parts in a loop of your own, without the Trainer",
    )
    options = parser.parse_args(args)
    path: Path = options.path
    if path.exists():
        return _refuse(f"'{path}' exists already, and is left as it is")
    if options.plain_loop:
        return _copy_plain_loop(path)
    name = path.name
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        return _refuse(f"'{name}' cannot be the name of a public Python package; use letters, digits and underscores")
    if name in built_in_modules() or importlib.util.find_spec(name) is not None:
        return _refuse(f"'{name}' is the name of a module that exists already; choose another")
    return _copy_experiment(path)


def _copy_plain_loop(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PLAIN_LOOP.read_text().replace("THIS_FILE", path.name))
    except OSError as error:
        return _refuse(f"'{path}' cannot be written: {error.strerror}")
    print(f"wrote {path}; run it: python {path}")
    return 0


def _copy_experiment(path: Path) -> int:
    name = path.name
    class_prefix = "".join(word.capitalize() for word in name.split("_"))
    try:
        path.mkdir(parents=True)
        for source in sorted(_EXPERIMENT.glob("*.py")):
            text = source.read_text().replace("Template", class_prefix).replace("template_", f"{name}_")
            (path / source.name).write_text(text)
    except OSError as error:
        return _refuse(f"'{path}' cannot be written: {error.strerror}")
    print(f"wrote {path}/; run it: torchtitan train --module {path} --config debugmodel")
    return 0


def _refuse(message: str) -> int:
    print_error("new", message)
    return 2
