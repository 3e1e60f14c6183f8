"""Functions of the user's that turn the rows of a data set into rows of a known format."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.config.registry import import_failure, suggest
from torchtitan.tools.errors import UserError

RowFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Takes a row, its cells by column, and gives one of a known format (`{"messages": […], "tools": […]}`,
`{"text": …}`, …), or None to leave it out."""


def load_function(named: str) -> RowFunction:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises:
        UserError: there is no such file, module or function, or importing it fails.
    """
    place, _, name = named.rpartition(":")
    module = _import_file(Path(place).expanduser(), named) if place.endswith(".py") else _import_module(place, named)
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    if name not in functions:
        raise UserError(f"{named!r}: {place} has no function {name!r}{suggest(name, functions)}")
    return functions[name]


def _import_file(path: Path, named: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{named!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"row_functions_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses, for one, look for the names in their annotations
    try:
        with _importable(path.absolute().parent):
            spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise import_failure(str(path), error) from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Have the modules of a folder found, behind all others: what is beside a file hides no library."""
    if str(folder) in sys.path:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_module(name: str, named: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{named!r} must be of the form package.module:function or path/to/file.py:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(f"{named!r}: there is no module {name!r} to import; is it a file, {name}.py?") from error
        raise import_failure(name, error) from error
    except (ImportError, SyntaxError) as error:
        raise import_failure(name, error) from error
