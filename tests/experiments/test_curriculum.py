"""Curriculum by success rate, and replay of rare successes."""

import dataclasses
import itertools
import json
import operator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.experiments.test_rl import NUMBERS, folder, train_rl  # noqa: F401
from tests.processes import run_processes
from tests.training import killed_in, read_metrics
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.plan import StepStatistics, SuccessSampler
from torchtitan.components.rollout.replay import Replay
from torchtitan.components.rollout.trajectory import Trajectory
from torchtitan.experiments.reward.rated_rollouts import mean_rewards
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
from torchtitan.tools.errors import UserError
from torchtitan.trainer.rollouts import RolloutTrainer


def test_chances_equal_their_definition():
    """In float64: p (1 - p) of a moving average, mixed with a uniform chance."""
    sampler = SuccessSampler.Config(explore=0.2, momentum=0.25).build(n_samples=4, seed=0)
    assert sampler.chances() == pytest.approx([0.25] * 4)
    for rewards in ([1.0, 0.5], [3.0, 0.0]):  # cut to 0 to 1
        sampler.observe(
            StepStatistics(1, 0.0, 0.0, np.array([0, 2]), np.zeros(0), np.array(rewards))
        )
    rates = np.array([1.0, 0.5, 0.25 * 0.5, 0.5])
    weights = rates * (1 - rates)
    assert sampler.chances() == pytest.approx(0.8 * weights / weights.sum() + 0.05)


def test_prompts_without_a_chance_fill_a_draw_at_random():
    """With `explore` 0, a prompt that is always answered has none."""
    filled = set()
    for seed in range(40):
        sampler = SuccessSampler.Config(explore=0.0).build(n_samples=8, seed=seed)
        rewards = np.ones(7)
        sampler.observe(StepStatistics(1, 0.0, 0.0, np.arange(7), np.zeros(0), rewards))
        first, second = sampler.draw(2).tolist()
        assert first == 7
        filled.add(second)
    assert filled == set(range(7))


def test_rewards_of_a_prompt_are_averaged():
    numbers, rewards = mean_rewards([(7, 1.0), (3, 0.0), (7, 0.0), (7, 0.5)])
    assert numbers.tolist() == [3, 7] and rewards.tolist() == [0.0, 0.5]
    assert [values.tolist() for values in mean_rewards([])] == [[], []]
    orders = itertools.permutations([(3, 0.1), (3, 0.2), (3, 0.3)])
    assert len({float(mean_rewards(order)[1]) for order in orders}) == 1


def group(document: int, *rewards: float | None) -> list[Trajectory]:
    return [
        Trajectory(
            [1, 2, number], [0.0, 0.0, -1.0], [False, False, True], reward, document=document
        )
        for number, reward in enumerate(rewards)
    ]


def test_a_rare_success_replaces_the_last_failure():
    """The newest one is kept, for the prompts of the newest ones; frequent successes are not."""
    replay = Replay(2, success=1.0, rare=0.5)

    def mixed(*groups: list[Trajectory]) -> list[list[int | float | None]]:
        found = replay.mixed(groups, Ranks(), True)
        return [[t.tokens[-1] for t in each] + [each[-1].reward] for each in found]

    assert mixed(group(5, 0, 1.5, 0, None)) == [[0, 1, 2, 3, None]]
    assert mixed(group(6, 1, 1, 1, 0)) == [[0, 1, 2, 3, 0]] and len(replay) == 1
    assert mixed(group(5, 0, 0, 0.5), group(6, 0, 0)) == [[0, 1, 1, 1.5], [0, 1, 0]]
    state = replay.state_dict()
    assert mixed(group(5, 0, 0, 1, 0)) == [[0, 1, 2, 3, 0]]
    assert mixed(group(5, 0, 0, 0, 0)) == [[0, 1, 2, 2, 1]]  # the newest success is kept
    mixed(group(8, 1, 0), group(9, 1, 0))
    assert mixed(group(5, 0, 0)) == [[0, 1, 0]]
    restored = Replay(2)
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.state_dict() == state
    assert restored.mixed([group(5, 0, 0)], Ranks(), True)[0][-1].reward == 1.5
    assert Replay(0).mixed([group(5, 1, 0)], Ranks(), True)[0][0].reward == 1


def test_answers_of_other_data_are_dropped(caplog):
    """The numbers of prompts would name other prompts."""
    replay = Replay(2, data="one")
    replay.mixed([group(5, 1, 0)], Ranks(), True)
    same, other = Replay(2, data="one"), Replay(2, data="two")
    same.load_state_dict(replay.state_dict())
    assert len(same) == 1 and not caplog.records
    other.load_state_dict(replay.state_dict())
    assert len(other) == 0
    assert "1 answers are dropped, since they are of other data" in caplog.text


def test_rewards_of_other_types_are_saved():
    """A rollout may compute its rewards by NumPy or PyTorch."""
    trajectory = Trajectory([1, 2, 3], [0.0] * 3, [False, True, True], np.float32(1), document=5)
    trajectory.token_rewards = {1: torch.tensor(0.5)}
    trainer = SimpleNamespace(ranks=Ranks(), engine=SimpleNamespace(context=9))
    RolloutTrainer.take_rewards(trainer, [trajectory], 0)
    replay = Replay(1)
    replay.mixed([[trajectory, *group(5, 0)]], Ranks(), True)
    [kept] = json.loads(replay.state_dict()["kept"])
    assert kept["reward"] == 1 and kept["token_rewards"] == {"1": 0.5}


REWARDS = (
    "def rare(prompt, completion, row):\n"
    "    return float(len(completion) % 5 == row['number'] % 5)\n"
)


@pytest.fixture(scope="module")
def own(folder):  # noqa: F811
    """Options of runs in which some answers succeed."""
    (folder / "rare.py").write_text(REWARDS)
    return {
        "rewards": [f"{folder / 'rare.py'}:rare"],
        "training__steps": 8,
        "replay__size": 6,
    }


@pytest.mark.slow
def test_resume_is_exact(folder, own, tmp_path, monkeypatch):  # noqa: F811
    """Success rates and kept answers are in the checkpoint. Only sampled ones are shown."""
    drawn = []
    sampled, shown = [], []
    with_replay, write = RLTrainer.with_replay, RLTrainer.write_completions
    monkeypatch.setattr(
        RLTrainer, "with_replay", lambda self, each: sampled.append(each) or with_replay(self, each)
    )
    monkeypatch.setattr(
        RLTrainer, "write_completions", lambda self, each: shown.append(each) or write(self, each)
    )
    observe = SuccessSampler.observe

    def recorded(self, statistics):
        drawn.append(statistics)
        observe(self, statistics)

    monkeypatch.setattr(SuccessSampler, "observe", recorded)
    options = {**own, "checkpoint__interval": 2, "curriculum": True}
    train_rl(folder, tmp_path / "straight", **options)
    assert len(drawn) > 4 and all(
        len(s.samples) == len(s.sample_rewards) and 0 < len(s.samples) <= 4 for s in drawn
    )
    assert len(shown) == len(sampled) and all(map(operator.is_, shown, sampled))
    straight = [(s.step, s.samples.tolist(), s.sample_rewards.tolist()) for s in drawn]
    assert len(set(itertools.chain(*(samples for _, samples, _ in straight)))) > 4
    measured = read_metrics(tmp_path / "straight", *NUMBERS, "replayed")
    assert any(row[-1] > 0 for row in measured)
    with killed_in(RLTrainer, "complete_step", 5):
        train_rl(folder, tmp_path / "stopped", **options)
    train_rl(folder, tmp_path / "stopped", **options)
    assert read_metrics(tmp_path / "stopped", *NUMBERS, "replayed") == measured
    resumed = [(s.step, s.samples.tolist(), s.sample_rewards.tolist()) for s in drawn]
    assert resumed[-3:] == straight[-3:]


def observed_on_ranks(folder, dump, options):  # noqa: F811
    """Train, and write what each rank's sampler has observed."""
    observe, seen = SuccessSampler.observe, []

    def recorded(self, statistics):
        seen.append([statistics.samples.tolist(), statistics.sample_rewards.tolist()])
        observe(self, statistics)

    with mock.patch.object(SuccessSampler, "observe", recorded):
        train_rl(folder, dump, **options)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (dump / f"observed{rank}.json").write_text(json.dumps(seen))


@pytest.mark.slow
def test_two_processes_match_one(folder, own, tmp_path):  # noqa: F811
    """All ranks draw the same prompts by the rewards of all of them, and keep the same answers.
    Float32 sums differ by their order, which the steps amplify."""
    options = {**own, "curriculum": True, "debug__ledger": True}
    observed_on_ranks(folder, tmp_path / "one", options)
    run_processes(observed_on_ranks, 2, folder, tmp_path / "two", options)
    one, *two = (
        json.loads((tmp_path / name).read_text())
        for name in ("one/observed0.json", "two/observed0.json", "two/observed1.json")
    )
    assert two == [one, one] and len(one) == 7
    prompts = [
        [
            sorted(json.loads(line)["documents"])
            for line in (tmp_path / name / "ledger.jsonl").open()
        ]
        for name in ("one", "two")
    ]
    assert prompts[0] == prompts[1]
    names = (*NUMBERS, "replayed")
    one, two = (read_metrics(tmp_path / name, *names) for name in ("one", "two"))
    assert any(row[-1] > 0 for row in one)
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_rewards_change_the_draws_of_prompts_that_are_not_read_yet(folder, own, tmp_path):  # noqa: F811
    """With rollouts of one later step, the rewards of a step change the draws of the one after it,
    also in a resumed run: a sampler of its own, which observes them so late, draws the same."""
    observe, seen = PromptDataLoader.observe, {}

    def recorded(self, statistics):
        seen[statistics.step] = statistics
        observe(self, statistics)

    options = {**own, "curriculum": True, "rollout__max_staleness": 1, "checkpoint__interval": 2}
    with mock.patch.object(PromptDataLoader, "observe", recorded):
        with killed_in(RLTrainer, "complete_step", 6):
            train_rl(folder, tmp_path, **options)
        trainer = train_rl(folder, tmp_path, **options)

    def draws(n_late: int) -> list[list[int]]:
        sampler = SuccessSampler.Config().build(n_samples=12, seed=trainer.config.debug.seed)
        drawn = []
        for step in range(1, 9):
            if step > 1 + n_late:
                sampler.observe(seen[step - 1 - n_late])
            drawn.append(sorted(sampler.draw(4).tolist()))
        return drawn

    found = [sorted(seen[step].samples.tolist()) for step in range(1, 9)]
    assert found == draws(1)
    assert found != draws(0) and found != draws(2)


def test_what_cannot_be_combined_is_refused(folder, own, tmp_path):  # noqa: F811
    for options, message in (
        ({"policy__method": "dapo"}, r"--policy\.method is dapo, but must be another one with"),
        ({"policy__method": "reinforce_pp"}, "which compares answers to one prompt"),
        ({"policy__replay_experts": True}, r"--replay\.size cannot be combined with --policy\.rep"),
        ({"replay__size": -1}, r"--replay\.size is -1, but must be at least 0"),
        ({"replay__rare": 2}, r"--replay\.rare is 2\.0, but must be from 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            train_rl(folder, tmp_path, **{**own, **options})


def test_a_trainer_without_rewards_is_refused(tmp_path):
    config = llama3_debugmodel_sft()
    config.dump_folder = str(tmp_path)
    config.dataloader = dataclasses.replace(config.dataloader, sampler=SuccessSampler.Config())
    with pytest.raises(UserError, match="the sampler needs the rewards of answers, which Trainer"):
        config.build()
