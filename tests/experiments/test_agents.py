"""Runs with sampling settings, environments and awaited tools (`--module rl`)."""

import pytest

from tests.experiments.test_rl import folder, train_on_ranks, train_rl  # noqa: F401
from tests.processes import run_processes
from tests.training import read_metrics

SHORT = {"training__steps": 2, "checkpoint__interval": 100}

OWN = """
import asyncio
from torchtitan.components.rollout import Environment, Step, Trajectory

class Waits(Environment):
    max_turns = 3
    now = most = 0  # waiting environments
    async def step(self, reply):
        Waits.now += 1
        Waits.most = max(Waits.most, Waits.now)
        await asyncio.sleep(0.2)
        Waits.now -= 1
        named = {"length": len(reply.content), "at_once": Waits.most}
        return Step("again", reward=len(reply.content) / 100, named=named)

class Talks(Environment):
    def step(self, reply):
        return Step("again " * 40)

class Fills(Environment):
    def reset(self, row):
        return "again " * 200

async def forever(row, engine):
    tokens = list(engine.prompt)
    while True:
        turn = await engine.generate(tokens)
        tokens += [*turn.ids, *engine.encode([{"role": "user", "content": "more and more"}])]

async def some(prompt, completion, row):
    await asyncio.sleep(0)
    return None if row["number"] % 2 else {"length": len(completion), "even": 1}
"""


def metrics_of(folder, dump, *names, **options):  # noqa: F811
    train_rl(folder, dump, **{**SHORT, **options})
    return read_metrics(dump, *names)


@pytest.mark.slow
def test_trained_probabilities_are_those_of_the_sampler(folder, tmp_path):  # noqa: F811
    """At another temperature, both differ by rounding of float32; of restricted tokens, the weight
    is the probability of what they are restricted to."""
    names = ("sampler_gap", "importance_weight", "importance_cut", "entropy")
    settings = {"rollout__temperature": 0.5}
    for _, gap, weight, cut, entropy in metrics_of(folder, tmp_path / "a", *names, **settings):
        assert gap < 1e-5 and weight == pytest.approx(1, abs=1e-5) and cut == 0
        assert entropy < 8  # of 2,048 tokens with nearly equal probabilities, log(2048) = 7.6
    settings = {"rollout__top_p": 0.5, "policy__importance": "sequence"}
    for _, gap, weight, cut, _ in metrics_of(folder, tmp_path / "b", *names, **settings):
        assert gap == pytest.approx(0.69, abs=0.02)  # log 2
        assert weight < 0.01 and cut == 0  # 0.5 to the power of up to 8


@pytest.mark.slow
def test_an_environment_that_waits_delays_no_other(folder, tmp_path):  # noqa: F811
    """Sixteen rollouts of a step wait at the same time."""
    file = folder / "own.py"
    file.write_text(OWN)
    rows = metrics_of(
        folder, tmp_path, "reward", "rewards/length", "overlong", "no_verdict", "rewards/at_once",
        rollout__function=f"{file}:Waits", training__seq_len=128, rewards=[],
    )  # fmt: skip
    assert [row[3:5] for row in rows] == [(0, 0)] * 2 and all(row[1] > 0 for row in rows)
    assert rows[-1][5] > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "kind"),
    [("Talks", "mask"), ("forever", "mask"), ("Talks", "penalty"), ("Fills", "mask")],
)
def test_long_trajectories_do_not_end_the_run(folder, tmp_path, function, kind):  # noqa: F811
    file = folder / "own.py"
    file.write_text(OWN)
    rows = metrics_of(
        folder, tmp_path, "overlong", "no_verdict", "grad_norm",
        rollout__function=f"{file}:{function}", rollout__overlong=kind, rewards=[],
    )  # fmt: skip
    for _, overlong, no_verdict, norm in rows:
        assert overlong == 1 and no_verdict == (kind == "mask") and norm == 0


@pytest.mark.slow
def test_no_verdict_is_not_trained(folder, tmp_path):  # noqa: F811
    """Half of the prompts have none; the numbers that a function names are logged."""
    file = folder / "own.py"
    file.write_text(OWN)
    rows = metrics_of(
        folder, tmp_path, "no_verdict", "rewards/some/even", "reward", "rewards/some/length",
        rewards=[f"{file}:some"], training__steps=3,
    )  # fmt: skip
    assert {row[1] for row in rows} <= {0, 0.25, 0.5, 0.75} and any(row[1] for row in rows)
    assert all(row[2] == 1 and row[3] == pytest.approx(row[4] + 1) for row in rows)


LATE = """
import asyncio, os
async def late(prompt, completion, row):
    await asyncio.sleep(0.05 * (int(os.environ["RANK"]) + row["number"] % 2))
    return float(len(completion))
"""


@pytest.mark.slow
def test_awaited_rewards_of_tensor_parallel_ranks(folder, tmp_path, monkeypatch):  # noqa: F811
    """Rewards are awaited after the only text of a rollout, so ranks may wait differently long;
    tolerances as in test_two_processes_write_the_same."""
    file = folder / "late.py"
    file.write_text(LATE)
    monkeypatch.setenv("RANK", "0")
    options = {**SHORT, "training__local_batch_size": 4, "rewards": [f"{file}:late"]}
    train_rl(folder, tmp_path / "one", **options)
    options["parallelism__tensor_parallel_degree"] = 2
    options["parallelism__data_parallel_shard_degree"] = 1
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", options)
    one, two = (read_metrics(tmp_path / name, "loss", "reward") for name in ("one", "two"))
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)
