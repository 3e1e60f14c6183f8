"""What a row function is known by: it changes with all that decides what the function gives, and with nothing else."""

import importlib
import re
import sys
import threading

import pytest

from torchtitan.components.data.finetuning.functions import function_fingerprint, load_function
from torchtitan.tools.errors import UserError

DECORATOR = (
    "import functools\ndef safe(f):\n    @functools.wraps(f)\n    def g(row):\n        return f(row)\n    return g\n"
)
DECORATED = "from fingerprint_deco import safe\n@safe\ndef f(row):\n    return {'text': row['a'] + 'OLD'}\n"

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


def of_cell(source: str = CELL, name: str = "f") -> str:
    variables = {"__name__": "a_notebook"}
    exec(compile(source, "<cell>", "exec"), variables)
    return function_fingerprint(variables[name])


def test_decorated_in_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    deco, own = tmp_path / "fingerprint_deco.py", tmp_path / "fn.py"
    deco.write_text(DECORATOR)

    def fingerprint() -> str:
        sys.modules.pop("fingerprint_deco", None)
        importlib.invalidate_caches()
        return function_fingerprint(load_function(f"{own}:f"))

    own.write_text(DECORATED)
    first = fingerprint()
    assert fingerprint() == first
    own.write_text(DECORATED.replace("OLD", "NEW"))
    changed = fingerprint()
    deco.write_text(DECORATOR.replace("f(row)", "dict(f(row))"))
    assert len({first, changed, fingerprint()}) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"OLD"', '"NEW"'),  # a global of a function that it calls
        ('"y"', '"Y"'),
        ('compile("a")', 'compile("b")'),
        ('end: str = "."', 'end: str = "!"'),
        ("[PREFIX +", "['' + PREFIX +"),  # code of a comprehension in a function that it calls
        ('around("!")', 'around("?")'),  # a closure
        ("n=1", "n=2"),  # a default
    ],
)
def test_without_a_file(old, new):
    assert old in CELL and of_cell(CELL.replace(old, new)) != of_cell()


def test_is_the_same_in_another_process():
    """There, sets have another order, and objects other addresses."""
    assert list({0, 8}) != list({8, 0})
    assert of_cell(CELL.replace('{"x", "y", "z"}', "{0, 8}")) == of_cell(CELL.replace('{"x", "y", "z"}', "{8, 0}"))


def test_a_function_that_calls_itself():
    assert of_cell("def f(row):\n    return f(row)\n") != of_cell("def f(row):\n    return f(dict(row))\n")


def test_values_that_cannot_be_told_apart():
    lock = threading.Lock()

    def f(row):
        with lock:
            return row

    with pytest.raises(UserError, match=re.escape(f"{f.__qualname__} holds a lock, of which it cannot be told")):
        function_fingerprint(f)
