"""Two small environments: a calculator as a tool, and a game of several turns."""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.components.rollout import Environment, Reply, Step

_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST = 200  # characters of an expression


def calculate(text: str) -> str:
    """Return the value of an expression of numbers and + - * /, with 15 digits, or `error`."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](value(node.operand))
        number = node.value if isinstance(node, ast.Constant) else None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(text)
        return float(number)

    try:
        if len(text) > _LONGEST:
            raise ValueError(text)
        return f"{value(ast.parse(text.strip(), mode='eval').body):.15g}"
    except (SyntaxError, KeyError, ValueError, ArithmeticError, RecursionError):
        return "error"


class Calculator(Environment):
    """A question with a number as its answer: 1 if the last turn is this number. Rows have the
    columns `question` and `answer`."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "calculate",
                "description": "Compute an expression of numbers and + - * /.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "such as 2*3"}},
                    "required": ["expression"],
                },
            },
        },
    )
    max_turns = 4

    def reset(self, row: Mapping[str, object]) -> str:
        self._answer = str(row["answer"])
        self._n_calls = 0
        return str(row["question"])

    def step(self, reply: Reply) -> Step:
        if not reply.tool_calls:
            is_right = reply.content.strip() == self._answer
            named = {"calls": float(self._n_calls)}
            return Step(reward=float(is_right), is_done=True, named=named)
        self._n_calls += len(reply.tool_calls)
        results = [
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": call.id,
                "content": calculate(str(json.loads(call.arguments).get("expression", ""))),
            }
            for call in reply.tool_calls
        ]
        return Step(results)


class GuessNumber(Environment):
    """Find a number in two guesses. The answer to the first is higher or lower. The reward is 1 if
    one is right. Of three numbers, the middle one and the answer always find it; guesses at random
    find it in five of nine games. Rows have the columns `question` and `secret`."""

    max_turns = 2

    def reset(self, row: Mapping[str, Any]) -> str:
        self._secret = int(row["secret"])
        self._n_guesses = 0
        return str(row["question"])

    def step(self, reply: Reply) -> Step:
        self._n_guesses += 1
        text = reply.content.strip()
        named = {"guesses": float(self._n_guesses)}
        if not (text.isascii() and text.isdigit()):
            return Step(is_done=True, named=named)
        guess = int(text)
        if guess == self._secret:
            return Step(reward=1.0, is_done=True, named=named)
        return Step("higher" if guess < self._secret else "lower", named=named)
