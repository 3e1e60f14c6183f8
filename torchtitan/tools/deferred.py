"""Names of a package that are imported on first use, since their modules import torch, which takes
seconds."""

import importlib
from collections.abc import Callable, Mapping


def deferred(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose names come from `modules` (name → module in the
    package, or with dots before it, outside). The package imports the same names `if
    TYPE_CHECKING`, for type checkers and editors."""

    def attribute(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{modules[name]}", package), name)

    return attribute
