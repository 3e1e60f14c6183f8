"""User functions that convert rows to a known format: loaded by name, and fingerprinted by content."""

import copyreg
import hashlib
import importlib
import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torchtitan.components.data.sources.source import RowFunction
from torchtitan.config.registry import import_failure, suggest
from torchtitan.tools.errors import UserError


def load_function(named: str) -> RowFunction:
    """Return the function named by `package.module:function` or `path/to/file.py:function`; raises `UserError` if there
    is no such file, module or function, or importing it fails."""
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
    sys.modules[spec.name] = module  # dataclasses, for one, resolve their annotations there
    try:
        with _importable(path.absolute().parent):
            spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise import_failure(str(path), error) from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder last on `sys.path`, so that the modules in it hide no library."""
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


def function_fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a function: its file, or, outside of files (as in a notebook), its code and the globals it
    names; its defaults and closure; and the same for all functions among these, such as one wrapped by a decorator.

    Imports of the file are not included. Values are the current ones.

    Raises:
        UserError: it is not written in Python, or holds a value that cannot be compared with that of an earlier run.
    """
    if not inspect.isfunction(function):
        raise UserError(f"{function!r} is not a function written in Python; wrap it in one")
    parts = _Description(function.__qualname__).of(function)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Description:
    """JSON-ready descriptions of values; equal values have equal descriptions in every process."""

    def __init__(self, name: str):
        self._name = name
        self._seen: dict[int, int] = {}
        self._parts: list[Any] = []  # kept alive, so that new values have other ids

    def of(self, value: Any) -> Any:
        """Return the description of a value; a number if the value was already described or contains itself."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if inspect.isfunction(value):
            return ["function", value.__qualname__, *self._function(value)]
        if isinstance(value, CodeType):
            return [value.co_code.hex(), value.co_names, value.co_varnames, [self.of(item) for item in value.co_consts]]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type):
            return ["class", value.__qualname__, *self._class(value)]
        if isinstance(value, Mapping):
            return [type(value).__name__, [[self.of(key), self.of(item)] for key, item in value.items()]]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [self.of(item) for item in value]]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(json.dumps(self.of(item)) for item in value)]
        return ["object", self._reduced(value)]

    def _function(self, function: Any) -> Iterator[Any]:
        file = Path(function.__code__.co_filename)
        if file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            yield self.of(function.__code__)
            names = sorted(_names(function.__code__) & function.__globals__.keys())
            yield [[name, self.of(function.__globals__[name])] for name in names]
        yield [self.of(cell.cell_contents) for cell in function.__closure__ or ()]
        yield [self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        yield self.of(getattr(function, "__wrapped__", None))

    def _class(self, kind: type) -> Iterator[Any]:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file and Path(file).suffix == ".py":
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()
        else:  # as in a notebook
            yield [[name, self.of(item)] for name, item in vars(kind).items() if inspect.isfunction(item)]

    def _reduced(self, value: Any) -> Any:
        """Describe what pickle would write, independent of the order of sets."""
        try:
            registered = copyreg.dispatch_table.get(type(value))
            reduced = registered(value) if registered else value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except Exception as error:  # pickling may run any code of a class
            raise UserError(
                f"the function {self._name} holds a {type(value).__name__}, of which it cannot be told whether it is "
                f"that of an earlier run ({error}): make it inside of the function, or of a module that it imports"
            ) from None
        if isinstance(reduced, str):
            return reduced
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        self._parts += [reduced, parts]
        return [self.of(part) for part in parts]


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
