"""Write the data of docs/agents.md to the folder `agents`: demonstrations, of which many are bad,
and tasks to learn from and to be tested with."""

import json
import random
from pathlib import Path
from typing import Any

from torchtitan.components.rollout import Reply
from torchtitan.experiments.rl.environments import Calculator, GuessNumber

NAMES = "Lily Tom Ben Anna Sam Mia Max Sue Tim Amy".split()
FOLDER = Path("agents")


def sum_rows(rng: random.Random) -> list[dict[str, Any]]:
    """Return all sums of two digits, shuffled."""
    rows = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
    rng.shuffle(rows)
    return rows


def with_calculator(row: dict[str, Any], rng: random.Random, *, uses_tool: bool) -> dict[str, Any]:
    """Return a conversation that calls the tool, or one that guesses."""
    user = {"role": "user", "content": row["question"]}
    if not uses_tool:
        guess = {"role": "assistant", "content": str(rng.randrange(19))}
        return {"messages": [user, guess], "tools": Calculator.tools}
    function = {"name": "calculate", "arguments": {"expression": row["question"]}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "calculate"}
    messages = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**result, "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    return {"messages": messages, "tools": Calculator.tools}


def sum_demonstrations(n: int) -> list[dict[str, Any]]:
    """Return conversations about the sums to learn from; half of them call the tool."""
    rng = random.Random(0)
    learned = sum_rows(rng)[:70]  # the same ones as below
    return [with_calculator(rng.choice(learned), rng, uses_tool=i % 2 == 0) for i in range(n)]


def game_rows(names: list[str]) -> list[dict[str, Any]]:
    """Return games of all secrets."""
    return [
        {"question": f"{name} thinks of a number from 1 to 3.", "secret": secret}
        for name in names
        for secret in range(1, 4)
    ]


def game(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a game with guesses at random."""
    environment = GuessNumber()
    messages = [{"role": "user", "content": environment.reset(row)}]
    for turn in range(1, environment.max_turns + 1):
        guess = str(rng.randint(1, 3))
        messages.append({"role": "assistant", "content": guess})
        step = environment.step(Reply(guess))
        if step.is_done or turn == environment.max_turns:
            break
        messages.append({"role": "user", "content": step.message})
    return {"messages": messages}


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write a JSON Lines file."""
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    rng = random.Random(0)
    FOLDER.mkdir(exist_ok=True)
    sums = sum_rows(rng)
    learned, held_out = sums[:70], sums[70:]
    demos = [with_calculator(rng.choice(learned), rng, uses_tool=n % 2 == 0) for n in range(1000)]
    games = game_rows(NAMES[:8])
    demos += [game(rng.choice(games), rng) for _ in range(1000)]
    rng.shuffle(demos)
    write("demonstrations.jsonl", demos)
    write("sum_demonstrations.jsonl", sum_demonstrations(4000))
    write("sums.jsonl", learned)
    write("sums_held_out.jsonl", held_out * 4)
    write("games.jsonl", games)
    write("games_held_out.jsonl", game_rows(NAMES[8:]) * 10)
