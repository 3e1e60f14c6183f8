"""Sources as syntax trees, which several tests of a process read: none may change them."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a syntax tree, as `ast.walk` yields them."""
    return list(ast.walk(tree))
