"""One thing per line: the rules of style that a syntax tree shows exactly."""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import PROJECT


def _contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(part, kind) for part in ast.walk(node))


def is_nested_conditional(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(_contains(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def is_conditional_raise(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and _contains(node, ast.IfExp)


def is_parallel_assignment(node: ast.AST) -> bool:
    """Three or more values, or one value for three or more targets. One value may be unpacked."""
    if not isinstance(node, ast.Assign):
        return False
    target, value = node.targets[0], node.value
    is_tuple = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
    return len(node.targets) > 2 or (is_tuple and len(target.elts) > 2)


def is_filled_through_new(node: ast.AST) -> bool:
    """`Class.__new__` makes an object without its `__init__`. A `__new__` may call `super()`'s."""
    if not (isinstance(node, ast.Attribute) and node.attr == "__new__"):
        return False
    is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
    return not is_super


RULES: dict[str, Callable[[ast.AST], bool]] = {
    "a conditional expression inside another": is_nested_conditional,
    "a conditional expression inside `raise`": is_conditional_raise,
    "an assignment of three or more values": is_parallel_assignment,
    "an object made by `__new__`": is_filled_through_new,
}


def broken_rules(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each place."""
    for node in ast.walk(ast.parse(code)):
        for rule, breaks in RULES.items():
            if breaks(node):
                yield node.lineno, rule


def test_lines_say_one_thing() -> None:
    places = []
    for path in sorted((PROJECT / "torchtitan").rglob("*.py")):
        name = path.relative_to(PROJECT).as_posix()
        places += [f"{name}:{line}: {rule}" for line, rule in broken_rules(path.read_text())]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    "code",
    [
        "x = 1 if a else 2 if b else 3",
        "x = f'{1 if a else 2}' if b else 3",
        "raise ValueError(f'{1 if a else 2}')",
        "raise A() if a else B()",
        "a, b, c = 1, 2, 3",
        "self.a, self.b, self.c = a, b, c",
        "a = b = c = 0",
        "x = Class.__new__(Class)",
        "x = object.__new__(type(self))",
    ],
)
def test_a_broken_rule_is_found(code: str) -> None:
    assert list(broken_rules(code))


@pytest.mark.parametrize(
    "code",
    [
        "x = 1 if a else 2",
        "a, b = b, a",
        "batch, seq_len, dim = x.shape",
        "a = b = 0",
        "def __new__(cls):\n    return super().__new__(cls)",
    ],
)
def test_a_plain_line_is_allowed(code: str) -> None:
    assert not list(broken_rules(code))
