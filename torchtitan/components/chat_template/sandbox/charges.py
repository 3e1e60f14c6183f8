"""Charges that are inserted into a template, for what the environment does not charge for."""

from typing import Any

import jinja2
import jinja2.nodes as nodes
import jinja2.runtime
from jinja2.visitor import NodeTransformer

from torchtitan.components.chat_template.sandbox.budget import progress_of

STEP = 512
"""Price of a loop iteration or call."""

ITERATION = "an iteration"
VALUE = "a value"
CONCAT = "a concatenation"
"""Filters that `add_charges` inserts, with names that templates cannot use: the cheapest way to
call a function."""


def add_charges(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Insert filters into `tree` that charge for constructs that the environment does not charge
    for."""
    _Charges().visit(tree)
    tree.set_environment(environment)
    return tree


def literals(tree: nodes.Node) -> list[str]:
    """Return the literal texts in a template or a part of it."""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    return texts + [
        node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
    ]


class _Charges(NodeTransformer):
    """Charges for loop iterations, lists, dictionaries, comparisons and concatenations."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(text) for child in node.body for text in literals(child))
        self.generic_visit(node)
        price = nodes.Const(STEP + written, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter(ITERATION, price), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(
            isinstance(side, nodes.Const)
            for side in (node.expr, *(operand.expr for operand in node.ops))
        ):
            node.expr = _filter(VALUE, node.expr)
            for operand in node.ops:
                operand.expr = _filter(VALUE, operand.expr)
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            raise jinja2.TemplateSyntaxError("blocks cannot have filters", node.lineno)
        self.generic_visit(node)
        return node

    visit_AssignBlock = visit_FilterBlock

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        return (
            node if is_constant or getattr(node, "ctx", "load") == "store" else _filter(VALUE, node)
        )

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(CONCAT, nodes.List(node.nodes, lineno=node.lineno))


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def charge_iteration(context: jinja2.runtime.Context, price: int) -> None:
    """Charge for an iteration of a loop."""
    progress = progress_of(context)
    progress.spend(price)
    progress.check_time()


@jinja2.pass_context
def charge_value(context: jinja2.runtime.Context, value: object) -> Any:
    """Charge for the size of a value, and return it."""
    progress = progress_of(context)
    progress.spend(len(value) if type(value) is str else progress.size(value))
    return value


@jinja2.pass_context
def charge_concat(context: jinja2.runtime.Context, parts: list[object]) -> str:
    """Charge for texts, and return them as one."""
    return jinja2.runtime.str_join(charge_value(context, parts))
