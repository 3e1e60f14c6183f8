"""Skipped data: `--training.skip_data`."""

import json

import pytest

from tests.training import read_metrics, tiny_config, train
from torchtitan.config.sections import parse_step_ranges
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


def documents(folder) -> dict[int, list[str]]:
    """Data step → documents."""
    lines = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    return {line["data_step"]: line["documents"] for line in lines}


def test_ranges():
    assert parse_step_ranges([]) == []
    assert parse_step_ranges(["100-120", "300"]) == [range(100, 121), range(300, 301)]


@pytest.mark.parametrize("word", ["", "x", "0", "-3", "5-3", "1-2-3", "1,2", "0-4", "2-", "１"])
def test_invalid_range_is_rejected(tmp_path, word):
    config = tiny_config(tmp_path)
    config.training.skip_data = ["7", word]
    with pytest.raises(UserError, match="skip_data '.*' is neither a step from 1"):
        config.check(world_size=1)


def test_step_trains_on_the_following_data(tmp_path, caplog):
    options = {"debug__ledger": True, "training__global_batch_size": 4}
    train(tmp_path / "all", **options, training__steps=9)
    with caplog.at_level("INFO", logger="torchtitan"):
        train(
            tmp_path / "some", **options, training__steps=5, training__skip_data=["2-3", "4", "6"]
        )
    all_data, some = documents(tmp_path / "all"), documents(tmp_path / "some")
    assert list(some) == [1, 5, 7, 8, 9]
    assert some == {step: all_data[step] for step in some}
    assert [step for (step,) in read_metrics(tmp_path / "some")] == [1, 2, 3, 4, 5]
    assert "skipping the data of steps 2 to 4" in caplog.text
    assert "skipping the data of steps 6 to 6" in caplog.text


class Killed(Exception):
    """Simulates a kill between two steps."""


class KilledAfterStepFive(Trainer):
    def complete_step(self, outcome):
        super().complete_step(outcome)
        if self.step == 5:
            raise Killed

    def save_last_step(self, error):
        """A kill saves nothing."""


SAVING = {
    "debug__ledger": True,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "training__steps": 7,
}


@pytest.mark.slow
def test_resumed_run_counts_skipped_data(tmp_path):
    """Skips before and after the checkpoint of step 3 are bit-identical to an uninterrupted run."""
    options = {**SAVING, "training__skip_data": ["2", "5-6"]}
    train(tmp_path / "straight", **options)
    with pytest.raises(Killed):
        train(tmp_path / "resumed", trainer_class=KilledAfterStepFive, **options)
    train(tmp_path / "resumed", **options)
    assert list(documents(tmp_path / "resumed")) == [1, 3, 4, 7, 8, 9, 10]
    for name in ("loss", "grad_norm"):
        assert read_metrics(tmp_path / "resumed", name) == read_metrics(tmp_path / "straight", name)
    assert documents(tmp_path / "resumed") == documents(tmp_path / "straight")


def test_spike_is_skipped_on_resume(tmp_path):
    """Resume from a checkpoint and skip the harmful data; ranges before the checkpoint are
    ignored."""
    with pytest.raises(Killed):
        train(tmp_path, trainer_class=KilledAfterStepFive, **SAVING)
    train(tmp_path, **SAVING, training__skip_data=["1", "4-5"])
    assert list(documents(tmp_path)) == [1, 2, 3, 6, 7, 8, 9]


def test_data_ends_inside_a_skipped_range(tmp_path, caplog):
    text = tmp_path / "small.txt"
    text.write_text(" ".join(f"word{i}" for i in range(200)))
    options = {"dataloader__dataset": text, "training__epochs": 1}
    steps = train(tmp_path / "all", **options).step
    with caplog.at_level("INFO", logger="torchtitan"):
        some = train(
            tmp_path / "some", **options, training__skip_data=["2-3", f"{steps}-{steps + 5}"]
        )
    assert some.step == some.total_steps == some.lr_scheduler.total_steps == steps - 3
    assert f"training completed: {steps - 3} steps" in caplog.text
