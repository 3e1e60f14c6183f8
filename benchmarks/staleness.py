"""Steps per hour of reinforcement learning in an environment that waits, by the steps that rollouts
may run ahead (`--rollout.max_staleness`).

    python benchmarks/staleness.py [--steps 40] [--staleness 0 1 4] [--simulate]

Each step has 4 prompts with 4 rollouts each. A rollout has two turns of 8 tokens, after each of
which the environment sleeps 0.2 to 2 seconds, drawn with a fixed seed. The model has 2 layers of
width 64 and random weights. Times are of all steps, the first included, as the runs log them; the
runs follow one another. `--simulate` prints the ratios of runs whose computing takes no time
instead: steps are trained in order, so that a slow rollout also delays the steps after its own.
"""

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from torchtitan.components.rollout import Environment, Reply, Step

OPTIONS = (
    "--module=rl --config=rl_debugmodel --model.dim=64 --model.ffn_dim=128 --model.n_layers=2 "
    "--training.local_batch_size=4 --training.seq_len=256 --training.mixed_precision_param=float32 "
    "--activation_checkpoint.mode=none --rollout.group_size=4 --rollout.max_new_tokens=8 "
    "--rollout.max_rows=256 --metrics.log_freq=1 --metrics.no_enable_tensorboard "
    "--checkpoint.no_enable --validator.no_enable"
)


class Sleeps(Environment):
    """Sleeps after each turn; the reward is the length of the replies."""

    max_turns = 2
    numbers = itertools.count()

    def reset(self, row: object) -> None:
        self.random = random.Random(next(Sleeps.numbers))

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(self.random.uniform(0.2, 2))
        return Step("Go on.", reward=len(reply.content) / 100)


def simulate(staleness: int, steps: int, n_runs: int = 300) -> float:
    """Return the mean seconds of a step that only sleeps: it begins when the weights may be used,
    and ends after the step before it."""
    numbers, total = random.Random(0), 0.0
    for _ in range(n_runs):
        ends = [0.0] * (staleness + 1)
        for _ in range(steps):
            turns = [sum(numbers.uniform(0.2, 2) for _ in range(2)) for _ in range(16)]
            ends.append(max(ends[-1], ends[-staleness - 1] + max(turns)))
        total += ends[-1] / steps
    return total / n_runs


def measure(staleness: int, steps: int) -> tuple[float, float, float]:
    """Return the steps per hour, the mean age of tokens in steps, and the highest one."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *OPTIONS.split(),
            f"--rollout.function={Path(__file__).resolve()}:Sleeps",
            f"--rollout.max_staleness={staleness}",
            f"--training.steps={steps}",
            f"--dump_folder={folder}",
        ]
        command = [sys.executable, "-m", "torchtitan.cli.main", "train", *words]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    seconds = sum(row["step_time"] for row in rows)
    mean = sum(row.get("staleness", 0) for row in rows) / len(rows)
    return 3600 * len(rows) / seconds, mean, max(row.get("staleness_max", 0) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    if args.simulate:
        for staleness in args.staleness:
            ratio = simulate(0, args.steps) / simulate(staleness, args.steps)
            print(f"max_staleness {staleness}: ratio {ratio:.2f}")
        return
    print("| max_staleness | steps per hour | ratio | mean age | highest age |")
    print("|---:|---:|---:|---:|---:|")
    first = 0.0
    for staleness in args.staleness:
        rate, mean, most = measure(staleness, args.steps)
        first = first or rate
        print(f"| {staleness} | {rate:.0f} | {rate / first:.2f} | {mean:.2f} | {most:.0f} |")


if __name__ == "__main__":
    main()
