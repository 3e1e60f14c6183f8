"""`torchtitan new`: create an experiment or a plain training loop from a template."""

import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from torchtitan.cli.model_options import run_command
from torchtitan.config.registry import built_in_modules
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

_PACKAGE = Path(__file__).resolve().parent.parent
_EXPERIMENT = _PACKAGE / "experiments" / "template"
_PLAIN_LOOP = Path(__file__).resolve().parent / "templates" / "plain_loop.py"


def new(args: Sequence[str]) -> int:
    """Copy the requested template and return the exit code."""
    parser = Parser(
        prog="torchtitan new",
        description="Create an experiment: a folder with an explicit training step, ready to run.",
    )
    parser.add_argument(
        "path", type=Path, help="folder of the experiment, or the script's file with --plain-loop"
    )
    parser.add_argument(
        "--plain-loop",
        action="store_true",
        help="create a single script instead, with a training loop that uses torchtitan's "
        "components without "
        "the Trainer",
    )
    options = parser.parse_args(args)
    return run_command("new", lambda: _copy(options.path, plain_loop=options.plain_loop))


def _copy(path: Path, *, plain_loop: bool) -> None:
    name = path.name
    if path.exists():
        raise UserError(f"'{path}' already exists; choose another name")
    if not plain_loop and (
        not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_")
    ):
        raise UserError(
            f"'{name}' cannot be the name of a public Python package; use letters, digits and "
            "underscores"
        )
    if not plain_loop and (
        name in built_in_modules() or importlib.util.find_spec(name) is not None
    ):
        raise UserError(f"'{name}' is the name of an existing module; choose another name")
    class_prefix = "".join(word.capitalize() for word in name.split("_"))
    with os_errors_as(f"'{path}' cannot be written"):
        (path.parent if plain_loop else path).mkdir(parents=True, exist_ok=True)
        if plain_loop:
            path.write_text(_PLAIN_LOOP.read_text().replace("THIS_FILE", name))
        else:
            for source in sorted(_EXPERIMENT.glob("*.py")):
                text = (
                    source.read_text()
                    .replace("Template", class_prefix)
                    .replace("template_", f"{name}_")
                )
                (path / source.name).write_text(text)
    command = (
        f"python {path}" if plain_loop else f"torchtitan train --module {path} --config debugmodel"
    )
    print(presentable(f"wrote {path}{'' if plain_loop else '/'}; run it: {command}"))
