"""Fingerprints of row functions: they change if and only if the results may change."""

import importlib
import sys
import threading

import pytest

from torchtitan.components.data.finetuning.functions import function_fingerprint, load_function
from torchtitan.tools.errors import UserError

DECORATOR = (
    "import functools\ndef safe(f):\n    @functools.wraps(f)\n    def g(row):\n        return "
    "f(row)\n    return g\n"
)
DECORATED = (
    "from fingerprint_deco import safe\n@safe\ndef f(row):\n    return {'text': row['a'] + 'OLD'}\n"
)

CELL = """
import re
from dataclasses import dataclass
PREFIX, TABLE, PATTERN = "OLD", {"a": {"x", "y", "z"}}, re.compile("a")
@dataclass
class Style:
    end: str = "."
STYLE = Style()
def helper(text):
    return [PREFIX + PATTERN.sub(STYLE.end, part) for part in text]
def around(ending):
    def f(row, n=1):
        return {"text": [helper(row["a"]) for _ in range(n)], **TABLE, "ending": ending}
    return f
f = around("!")
"""


def cell_fingerprint(source: str = CELL, name: str = "f") -> str:
    variables = {"__name__": "a_notebook"}
    exec(compile(source, "<cell>", "exec"), variables)
    return function_fingerprint(variables[name])


def test_decorator_in_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    decorator_file, function_file = tmp_path / "fingerprint_deco.py", tmp_path / "fn.py"
    decorator_file.write_text(DECORATOR)

    def fingerprint() -> str:
        sys.modules.pop("fingerprint_deco", None)
        importlib.invalidate_caches()
        return function_fingerprint(load_function(f"{function_file}:f"))

    function_file.write_text(DECORATED)
    first = fingerprint()
    assert fingerprint() == first
    function_file.write_text(DECORATED.replace("OLD", "NEW"))
    changed = fingerprint()
    decorator_file.write_text(DECORATOR.replace("f(row)", "dict(f(row))"))
    assert len({first, changed, fingerprint()}) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"OLD"', '"NEW"'),  # a global variable of a called function
        ('"y"', '"Y"'),
        ('compile("a")', 'compile("b")'),
        ('end: str = "."', 'end: str = "!"'),
        ("[PREFIX +", "['' + PREFIX +"),  # a comprehension in a called function
        ('around("!")', 'around("?")'),  # a closure
        ("n=1", "n=2"),  # a default
    ],
)
def test_function_of_a_notebook_cell(old, new):
    assert old in CELL and cell_fingerprint(CELL.replace(old, new)) != cell_fingerprint()


def test_fingerprint_is_equal_in_another_process():
    """Another process orders sets differently and has different object addresses."""
    assert list({0, 8}) != list({8, 0})
    assert cell_fingerprint(CELL.replace('{"x", "y", "z"}', "{0, 8}")) == cell_fingerprint(
        CELL.replace('{"x", "y", "z"}', "{8, 0}")
    )


def test_recursive_function():
    assert cell_fingerprint("def f(row):\n    return f(row)\n") != cell_fingerprint(
        "def f(row):\n    return f(dict(row))\n"
    )


def test_functions_of_other_languages_are_rejected():
    with pytest.raises(UserError, match="is not a function written in Python"):
        function_fingerprint(len)


def test_values_without_a_fingerprint_are_rejected():
    numbers = (number for number in range(3))

    def f(row):
        return next(numbers)

    with pytest.raises(
        UserError,
        match=r"f uses a value that cannot be fingerprinted .*cannot pickle 'generator' obj",
    ):
        function_fingerprint(f)


@pytest.mark.parametrize("create", [threading.Lock, threading.RLock, threading.Condition])
def test_locks_are_rejected(create):
    lock = create()

    def f(row):
        with lock:
            return row

    with pytest.raises(
        UserError,
        match=r"f uses a value that cannot be fingerprinted .*\(a (lock|RLock|Condition)\)",
    ):
        function_fingerprint(f)
