"""Runs whose rollouts begin before their step (`--rollout.max_staleness`)."""

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.commands import RunningCommand
from tests.experiments.test_rl import OPTIONS, folder, train_on_ranks, train_rl  # noqa: F401
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics
from torchtitan.components.losses.policy_loss import PolicyLoss
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.tools.errors import UserError

OWN = """
import asyncio
import random
from torchtitan.components.rollout import Environment, Step, Trajectory

class Slow(Environment):
    max_turns = 2
    def reset(self, row):
        self.random = random.Random(row["number"])
    async def step(self, reply):
        await asyncio.sleep(self.random.uniform(0.005, 0.05))
        return Step("again", reward=len(reply.content) / 100)

class Fails(Slow):
    async def step(self, reply):
        if self.random.random() < 0.2:
            raise ValueError("lost")
        return await super().step(reply)

async def uneven(row, engine):
    answer = await engine.generate(engine.prompt, 3 + row["number"] % 5)
    tokens = [*engine.prompt, *answer.ids]
    logprobs = [*[0.0] * len(engine.prompt), *answer.logprobs]
    mask = [*[False] * len(engine.prompt), *[True] * len(answer.ids)]
    return Trajectory(tokens, logprobs, mask, float(answer.ids[0] % 7))
"""
AHEAD = {
    "rollout__max_staleness": 2,
    "training__steps": 6,
    "training__seq_len": 128,
    "rewards": [],
    "debug__ledger": True,
    "checkpoint__interval": 100,
    "checkpoint__last_save_in_hf": False,
    "checkpoint__export_dtype": None,
}
MEASURES = ("staleness", "staleness_max", "dropped")


@pytest.fixture(scope="module")
def slow(folder) -> dict:  # noqa: F811
    """Options of a run with an environment that waits."""
    file = folder / "slow.py"
    file.write_text(OWN)
    return {**AHEAD, "rollout__function": f"{file}:Slow"}


def ledger_of(dump: Path) -> list[dict]:
    return list(map(json.loads, (dump / "ledger.jsonl").read_text().splitlines()))


def trained(dump: Path) -> list[list[str]]:
    """Return the prompts of each step."""
    return [line["documents"] for line in ledger_of(dump)]


@pytest.fixture(scope="module")
def straight(folder, slow, tmp_path_factory) -> Path:  # noqa: F811
    """Folder of a run without rollouts of later steps."""
    dump = tmp_path_factory.mktemp("straight")
    train_rl(folder, dump, **{**slow, "rollout__max_staleness": 0})
    return dump


def test_each_step_trains_its_own_prompts(folder, slow, straight, tmp_path):  # noqa: F811
    """The prompts of a step are those without `max_staleness`, and the last step begins nothing for
    later ones."""
    begun = mock.patch.object(
        RLTrainer, "rollouts_of", autospec=True, side_effect=RLTrainer.rollouts_of
    )
    with begun as counted:
        train_rl(folder, tmp_path, **slow)
    assert trained(tmp_path) == trained(straight) and len(trained(straight)) == 6
    assert counted.call_count == 6
    ages = read_metrics(tmp_path, *MEASURES)
    assert ages[0] == (1, 0, 0, 0) and max(most for _, _, most, _ in ages) in (1, 2)
    assert all(mean <= most for _, mean, most, _ in ages)
    line = json.loads((straight / "metrics.jsonl").read_text().splitlines()[0])
    assert not {*MEASURES} & line.keys()


@pytest.mark.parametrize("name", ["Slow", "uneven"])
def test_log_probabilities_are_of_the_recorded_weights(folder, slow, tmp_path, monkeypatch, name):  # noqa: F811
    """What the loss corrects for equals a pass of the whole text by the weights with which each
    token was drawn, also where they changed within a text. In float32, the passes differ by the
    order of sums, up to 1e-5 here; other weights differ by more than 1e-3."""
    weights, groups, corrected = {}, [], []
    measure, call, train_step = (
        RLTrainer.measure_staleness, PolicyLoss.__call__, RLTrainer.train_step,
    )  # fmt: skip

    def keep_weights(trainer, batches):
        weights[trainer.step] = copy.deepcopy(trainer.model_parts[0]).eval()
        return train_step(trainer, batches)

    def keep_groups(trainer, found):
        groups.append(found)
        measure(trainer, found)

    def keep_corrected(loss, log_probs_N, tokens):
        corrected.append(tokens["logprobs"].clone())
        return call(loss, log_probs_N, tokens)

    monkeypatch.setattr(RLTrainer, "train_step", keep_weights)
    monkeypatch.setattr(RLTrainer, "measure_staleness", keep_groups)
    monkeypatch.setattr(PolicyLoss, "__call__", keep_corrected)
    function = slow["rollout__function"].replace("Slow", name)
    train_rl(folder, tmp_path, **{**slow, "rollout__function": function})
    found, expected, of_trained, ages = [], [], [], []
    n_changes = 0
    for step, groups_of_step in enumerate(groups):
        for trajectory in itertools.chain(*groups_of_step):
            every = {
                v: logprobs_of(weights[v], trajectory.tokens) for v in {*trajectory.versions} - {-1}
            }
            now = logprobs_of(weights[step], trajectory.tokens)
            n_changes += sum(-1 < a < b for a, b in itertools.pairwise(trajectory.versions))
            for place, version in enumerate(trajectory.versions):
                assert (version >= 0) == trajectory.loss_mask[place]
                if version >= 0:
                    found.append(trajectory.logprobs[place])
                    expected.append(every[version][place])
                    of_trained.append(now[place])
                    ages.append(step - version)
    assert found == pytest.approx(expected, abs=1e-5) and {0, 1, 2} >= {*ages} > {0}
    assert n_changes > 0 or name == "Slow"
    stale = [n for n, age in enumerate(ages) if age]
    assert max(abs(found[n] - of_trained[n]) for n in stale) > 1e-3
    assert sorted(torch.cat(corrected).tolist()) == pytest.approx(sorted(expected), abs=1e-5)


def logprobs_of(model, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token; 0 for the first."""
    with torch.no_grad():
        rows = model(torch.tensor([tokens]))[0].float().log_softmax(dim=-1)
    return [0.0, *rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()]


def test_an_interrupted_run_trains_each_prompt_once(folder, slow, straight, tmp_path):  # noqa: F811
    """Ends after the fourth step, before its checkpoint, with the rollouts of two more in
    flight."""
    options = {**slow, "checkpoint__interval": 2}
    with killed_in(RLTrainer, "complete_step", 4):
        train_rl(folder, tmp_path, **options)
    train_rl(folder, tmp_path, **options)
    assert trained(tmp_path) == trained(straight)
    assert [step for step, *_ in read_metrics(tmp_path, *MEASURES)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_killed_process_loses_no_prompt(folder, slow, straight, tmp_path):  # noqa: F811
    """SIGKILL at two moments of one run."""
    options = {key.replace("__", "."): value for key, value in slow.items()}
    own = {
        "hf_assets_path": folder / "model", "dump_folder": tmp_path,
        "dataloader.dataset": [folder / "prompts.jsonl"], "dataloader.cache_dir": folder / "cache",
    }  # fmt: skip
    words = flags({**own, **OPTIONS, **options, "checkpoint.interval": 1})
    command = [sys.executable, "-m", "torchtitan.cli.main", "train", "--module", "rl"]
    command += ["--config", "grpo", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for n_steps, seconds in ((2, 0.0), (4, 0.05)):
        process = RunningCommand(command, env=environment, stderr=subprocess.DEVNULL)
        ledger, deadline = tmp_path / "ledger.jsonl", time.monotonic() + 120
        while not ledger.exists() or len(ledger.read_bytes().splitlines()) < n_steps:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    train_rl(folder, tmp_path, **{**slow, "checkpoint__interval": 1})
    assert trained(tmp_path) == trained(straight)


def test_a_failed_later_rollout_ends_the_run(folder, slow, straight, tmp_path):  # noqa: F811
    """A rollout that fails ends the run, whatever its step; the mended run continues."""
    fails = {**slow, "rollout__function": slow["rollout__function"].replace(":Slow", ":Fails")}
    with pytest.raises(UserError, match=r"prompts\.jsonl:\d+: the rollout .*:Fails failed: ValueE"):
        train_rl(folder, tmp_path, **fails)
    train_rl(folder, tmp_path, **slow)
    assert trained(tmp_path) == trained(straight)


@pytest.mark.slow
def test_a_return_to_a_checkpoint_drops_what_is_in_flight(folder, slow, tmp_path, caplog):  # noqa: F811
    """Two spikes in a row undo step 3; the prompts of dropped rollouts follow in their order."""
    options = {
        "checkpoint__interval": 2,
        "spikes__max_in_a_row": 2,
        "spikes__action": "leave_out",
        "training__steps": 7,
    }
    spikes = ["", "", "a spike", "a spike", "", "", ""]
    with mock.patch.object(SpikeGuard, "spike", side_effect=spikes):
        train_rl(folder, tmp_path / "run", **{**slow, **options})
    assert "rollouts in flight are dropped; their prompts are read again" in caplog.text
    dropped = [n for _, _, _, n in read_metrics(tmp_path / "run", *MEASURES)]
    assert dropped == [0, 0, 0, 0, 32, 0, 0]  # two steps of four prompts, with four rollouts each
    train_rl(
        folder, tmp_path / "zero", **{**slow, "training__steps": 7, "rollout__max_staleness": 0}
    )
    assert trained(tmp_path / "run") == trained(tmp_path / "zero")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy__method": "ppo", "validator__enable": True},
        {"policy__method": "dapo", "training__epochs": 2, "training__steps": 100},
        {"policy__method": "reinforce_pp", "policy__minibatches": 2, "policy__updates": 2},
    ],
)
def test_methods_and_validation_run(folder, slow, tmp_path, options):  # noqa: F811
    """With a critic and validation between the steps, with resampling to the end of the data, and
    with several updates."""
    own = {**slow, **options}
    if "validator__enable" in options:
        own |= {"validator__dataset": str(folder / "prompts.jsonl"), "validator__steps": 1}
        own |= {"validator__freq": 2}
    train_rl(folder, tmp_path, **own)
    ages = read_metrics(tmp_path, *MEASURES)
    assert len(ages) == 6 and 0 < max(most for _, _, most, _ in ages) <= 2


@pytest.mark.slow
def test_two_processes_keep_the_prompts_of_each_step(folder, slow, straight, tmp_path):  # noqa: F811
    """Each process waits for its own rollouts, and all of them decode together."""
    options = {
        **slow,
        "training__local_batch_size": 1,
        "parallelism__data_parallel_shard_degree": 2,
    }
    run_processes(train_on_ranks, 2, folder, tmp_path, options)
    assert [sorted(step) for step in trained(tmp_path)] == [sorted(s) for s in trained(straight)]
    ages = read_metrics(tmp_path, *MEASURES)
    assert len(ages) == 6 and 0 < max(most for _, _, most, _ in ages) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, r"--rollout\.max_staleness is -1, but must be at least 0"),
        (
            {"parallelism.tensor_parallel_degree": 2},
            r"--parallelism\.tensor_parallel_degree 2 cannot be combined with "
            r"--rollout\.max_staleness 2",
        ),
        (
            {"rollout.engine": "vllm"},
            r"--rollout\.engine is vllm, but must be embedded with --rollout\.max_staleness 2",
        ),
        ({"training.skip_data": ["2"]}, r"--training\.skip_data is .*, but must be empty with --r"),
        (
            {"training.batch_schedule": ["2:8"]},
            r"--training\.batch_schedule is .*, but must be empty with --rollout\.max_staleness 2",
        ),
    ],
)
def test_what_cannot_run_ahead_is_refused(folder, tmp_path, options, message):  # noqa: F811
    changed = {name.replace(".", "__"): value for name, value in options.items()}
    staleness = changed.pop("max_staleness", 2)
    with pytest.raises(UserError, match=message):
        train_rl(folder, tmp_path, **{"rollout__max_staleness": staleness, **changed})


@pytest.mark.parametrize(
    ("module", "config"), [("preference", "online_dpo"), ("distillation", "on_policy")]
)
def test_losses_without_correction_are_refused(folder, module, config):  # noqa: F811
    words = flags({
        "hf_assets_path": folder / "model", "dataloader.dataset": [folder / "prompts.jsonl"],
        "rollout.max_staleness": 1,
    })  # fmt: skip
    more = ["--rewards", "length=20"] if config == "online_dpo" else ["--teacher.path", "x"]
    parsed = ConfigManager().parse_args(["--module", module, "--config", config, *words, *more])
    with pytest.raises(
        UserError, match=rf"max_staleness is 1, but must be 0 with --config {config}"
    ):
        parsed.config.validate()
