"""User functions that convert rows to a known format: loading by name, and fingerprints of their code."""

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


def load_function(reference: str) -> RowFunction:
    """Load the function `package.module:function` or `path/to/file.py:function`. Raise `UserError` if the file, module
    or function does not exist, or the import fails."""
    module_name, _, name = reference.rpartition(":")
    is_file = module_name.endswith(".py")
    module = (_import_file if is_file else _import_module)(module_name, reference)
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    if name not in functions:
        raise UserError(f"{reference!r}: {module_name} has no function {name!r}{suggest(name, functions)}")
    return functions[name]


def _import_file(name: str, reference: str) -> ModuleType:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{reference!r}: the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"row_functions_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by dataclasses, for example, to resolve annotations
    try:
        with _importable(path.absolute().parent):
            spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise import_failure(str(path), error) from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Append a folder to `sys.path` temporarily; last, so that its modules do not shadow libraries."""
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
        raise UserError(f"{reference!r} must have the form package.module:function or path/to/file.py:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(f"{reference!r}: the module {name!r} does not exist; for a file, use {name}.py") from error
        raise import_failure(name, error) from error
    except (ImportError, SyntaxError) as error:
        raise import_failure(name, error) from error


def function_fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of a function. It covers the function's file (or its code and globals if there is no file, as in
    a notebook), its defaults and closure, and recursively all functions among these, such as one wrapped by a
    decorator.

    The current values are used. Modules imported by the file are not included. Raise `UserError` if the function is not
    written in Python, or has a value that cannot be fingerprinted."""
    if not inspect.isfunction(function):
        raise UserError(f"{function!r} is not a function written in Python; wrap it in one")
    parts = _Description(function.__qualname__).encode(function)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Description:
    """JSON-serializable descriptions of values, equal for equal values in all processes."""

    def __init__(self, name: str):
        self._name = name
        self._seen: dict[int, int] = {}
        self._parts: list[Any] = []  # kept alive, so that their ids are not reused

    def encode(self, value: Any) -> Any:
        """Describe a value; return a number if the value was already described or contains itself."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if inspect.isfunction(value):
            return ["function", value.__qualname__, *self._function(value)]
        if isinstance(value, CodeType):
            constants = [self.encode(item) for item in value.co_consts]
            return [value.co_code.hex(), value.co_names, value.co_varnames, constants]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type):
            return ["class", value.__qualname__, *self._class(value)]
        if isinstance(value, Mapping):
            return [type(value).__name__, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [self.encode(item) for item in value]]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(json.dumps(self.encode(item)) for item in value)]
        return ["object", self._reduced(value)]

    def _function(self, function: Any) -> Iterator[Any]:
        file = Path(function.__code__.co_filename)
        if file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            yield self.encode(function.__code__)
            names = sorted(_names(function.__code__) & function.__globals__.keys())
            yield [[name, self.encode(function.__globals__[name])] for name in names]
        yield [self.encode(cell.cell_contents) for cell in function.__closure__ or ()]
        yield [self.encode(function.__defaults__), self.encode(function.__kwdefaults__)]
        yield self.encode(getattr(function, "__wrapped__", None))

    def _class(self, kind: type) -> Iterator[Any]:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file and Path(file).suffix == ".py":
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()
        else:  # defined in a notebook, for example
            yield [[name, self.encode(item)] for name, item in vars(kind).items() if inspect.isfunction(item)]

    def _reduced(self, value: Any) -> Any:
        """Describe the pickled value, regardless of the order of sets."""
        try:
            registered = copyreg.dispatch_table.get(type(value))
            reduced = registered(value) if registered else value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except Exception as error:  # pickling may run any code of a class
            raise UserError(
                f"the function {self._name} uses a {type(value).__name__}, which cannot be fingerprinted for the cache "
                f"({error}); create it inside the function, or in a module that the function imports"
            ) from None
        if isinstance(reduced, str):
            return reduced
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        self._parts += [reduced, parts]
        return [self.encode(part) for part in parts]


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
