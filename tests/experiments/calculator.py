"""A rollout with a tool: the model writes <calc>2*3</calc>, and reads the result before it
continues."""

import re
from collections.abc import Mapping
from typing import Any

from torchtitan.components.rollout.rollout import RolloutEngine, Trajectory
from torchtitan.experiments.rl.environments import calculate

CALL = re.compile(r"<calc>([^<]*)</calc>$")
MOST_CALLS = 4


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
