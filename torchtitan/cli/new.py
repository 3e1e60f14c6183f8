"""`torchtitan new`: create an experiment, a plain training loop or a recipe."""

import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from torchtitan.cli.model_options import run_command
from torchtitan.cli.recipes import RECIPES, cards_of, recipe_text
from torchtitan.config.registry import built_in_modules
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

_PACKAGE = Path(__file__).resolve().parent.parent
_EXPERIMENT = _PACKAGE / "experiments" / "template"
_PLAIN_LOOP = Path(__file__).resolve().parent / "templates" / "plain_loop.py"


def new(args: Sequence[str]) -> int:
    """Create the requested files, or list the recipes. Return the exit code."""
    parser = Parser(
        prog="torchtitan new",
        description="Create an experiment: a folder with an explicit training step, ready to run.",
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        help="folder of the experiment, or the file with --plain-loop or --recipe",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--plain-loop",
        action="store_true",
        help="create a single script instead, with a training loop that uses torchtitan's "
        "components without "
        "the Trainer",
    )
    kinds.add_argument(
        "--recipe",
        metavar="MODEL/METHOD",
        help="create a configuration file instead, such as qwen3-8b/lora",
    )
    kinds.add_argument(
        "--recipes", action="store_true", help="list the recipes and the cards they are for"
    )
    options = parser.parse_args(args)
    if options.recipes:
        _list_recipes()
        return 0
    if options.path is None:
        parser.error("the following arguments are required: path")
    if options.recipe:
        return run_command("new", lambda: _write_recipe(options.recipe, options.path))
    return run_command("new", lambda: _copy(options.path, plain_loop=options.plain_loop))


def _list_recipes() -> None:
    for recipe in RECIPES:
        number, kind = cards_of(recipe)
        print(presentable(f"{recipe:<20} {number} {kind}"))


def _write_recipe(recipe: str, path: Path) -> None:
    text = recipe_text(recipe, str(path))
    _check_free(path)
    with os_errors_as(f"'{path}' cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(presentable(f"wrote {path}; its first lines say how to run it"))


def _check_free(path: Path) -> None:
    if path.exists():
        raise UserError(f"'{path}' already exists; choose another name")


def _copy(path: Path, *, plain_loop: bool) -> None:
    name = path.name
    _check_free(path)
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
