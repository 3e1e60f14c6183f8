"""A rollout with a tool: the model writes <calc>2*3</calc>, and reads the result before it
continues."""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from torchtitan.components.rollout.rollout import RolloutEngine, Trajectory

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALL = re.compile(r"<calc>([^<]*)</calc>$")
MOST_CALLS = 4


def calculate(text: str) -> str:
    """Return the value of an expression of numbers and + - * /, or an error as text."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        return node.value

    try:
        return f"{value(ast.parse(text.strip(), mode='eval').body):g}"
    except (SyntaxError, KeyError, AssertionError, ZeroDivisionError):
        return "error"


async def rollout(row: Mapping[str, Any], engine: RolloutEngine) -> Trajectory:
    """Let the model answer, with the results of its calculations, and rate the whole answer by
    `--rewards`."""
    trajectory, answer = Trajectory(), ""
    trajectory.append(engine.prompt)
    for _ in range(MOST_CALLS):
        turn = await engine.generate(trajectory.tokens)
        trajectory.append(turn.ids, turn.logprobs)
        text = engine.decode(turn.ids)
        answer += text
        call = CALL.search(text)
        if call is None:
            break
        # Only the result is tokenized: the sampled ids stay as they are.
        result = f" = {calculate(call[1])}\n"
        trajectory.append(engine.tokenizer.encode(result, add_bos=False, add_eos=False))
        answer += result
    trajectory.reward = engine.reward(answer, row)
    return trajectory
