"""User functions that convert rows to a known format: loading by name, and fingerprints of their
code."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.components.data.sources.rows import first_line
from torchtitan.components.data.sources.source import RowFunction
from torchtitan.config.registry import import_failure
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.user_code import EXITS

_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Semaphore,
    threading.Event,
)


def load_function(reference: str) -> RowFunction:
    """Load the function `package.module:function` or `path/to/file.py:function`. Raise `UserError`
    if the file, module or function does not exist, or the import fails."""
    function: RowFunction = load_member(reference, inspect.isfunction)
    return function


def load_member(reference: str, is_wanted: Callable[[object], bool]) -> Any:
    """Load a function, or anything else that is wanted, as `load_function` does."""
    module_name, colon, name = reference.rpartition(":")
    if not colon:  # `CodeReference` must use the same rule to recognize code
        raise UserError(
            f"{reference!r} must have the form package.module:function or path/to/file.py:function"
        )
    is_file = module_name.endswith(".py")
    module = (_import_file if is_file else _import_module)(module_name, reference)
    functions = dict(inspect.getmembers(module, is_wanted))
    if name not in functions:
        raise UserError(
            f"{reference!r}: {module_name} has no function {name!r}{suggest(name, functions)}"
        )
    return functions[name]


def check_function_file(reference: str) -> None:
    """Raise `UserError` if the file of `path/to/file.py:function` does not exist; accept other
    texts."""
    path = Path(reference.rpartition(":")[0]).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise UserError(f"{reference!r}: the file {path} does not exist")


def _import_file(name: str, reference: str) -> ModuleType:
    check_function_file(reference)
    path = Path(name).expanduser()
    spec = importlib.util.spec_from_file_location(f"row_functions_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by dataclasses, for example, to resolve annotations
    try:
        with _importable(path.absolute().parent):
            spec.loader.exec_module(module)
    except (ImportError, SyntaxError, *EXITS) as error:
        raise import_failure(str(path), error) from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Append a folder to `sys.path` temporarily; last, so that its modules do not shadow
    libraries."""
    if str(folder) in sys.path:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_module(name: str, reference: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{reference!r} must have the form package.module:function or path/to/file.py:function"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            is_notebook = name.endswith(".ipynb")
            advice = "write the function to a file, NAME.py" if is_notebook else ""
            advice = advice or f"for a file, use {name}.py"
            raise UserError(
                f"{reference!r}: the module {name!r} does not exist; {advice}"
            ) from error
        raise import_failure(name, error) from error
    except (ImportError, SyntaxError, *EXITS) as error:
        raise import_failure(name, error) from error


def function_fingerprint(function: Callable[..., object]) -> str:
    """Return a digest of a function. It covers the function's file (or its code and globals
    without a file, as in a notebook), its defaults and closure, and all functions among these,
    such as one wrapped by a decorator.

    The current values are used. Modules imported by the file are not included. Raise `UserError` if
    the function is not written in Python, or has a value that cannot be fingerprinted."""
    if not inspect.isfunction(function):
        raise UserError(f"{function!r} is not a function written in Python; wrap it in one")
    from datasets.fingerprint import Hasher  # deferred: takes seconds

    def refusal(reason: str) -> UserError:
        return UserError(
            f"the function {function.__qualname__} uses a value that cannot be fingerprinted for "
            f"the cache ({reason}); create it inside the function, or in a module that the "
            "function imports"
        )

    def digest(value: object) -> str:
        try:
            return str(Hasher.hash(value))
        except Exception as error:  # pickling may run any code of a class
            raise refusal(first_line(error)) from None

    functions = [function]
    parts = []
    for found in functions:
        file = Path(found.__code__.co_filename)
        parts.append(
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else digest(found)
        )
        values = [cell.cell_contents for cell in found.__closure__ or ()]
        values += [found.__defaults__, found.__kwdefaults__, getattr(found, "__wrapped__", None)]
        # the hasher accepts them
        if locks := [value for value in values if isinstance(value, _LOCKS)]:
            raise refusal(f"a {type(locks[0]).__name__}")
        functions += [
            value for value in values if inspect.isfunction(value) and value not in functions
        ]
        parts.append(digest([None if inspect.isfunction(value) else value for value in values]))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
