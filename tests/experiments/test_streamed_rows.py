"""Runs of preferences and reinforcement learning on streams, stopped and resumed."""

from pathlib import Path
from typing import Any

import pytest

from tests.components.data.finetuning.test_streams import hub, write  # noqa: F401
from tests.experiments import test_preference_methods, test_rl
from tests.experiments.test_preference import folder, pair_of  # noqa: F401
from tests.training import killed_in, read_metrics
from torchtitan.experiments.preference.trainer import PreferenceTrainer
from torchtitan.experiments.rl.trainer import RLTrainer

STREAMED: dict[str, Any] = {
    "dataloader__stream": "all",
    "dataloader__shuffle_buffer": 4,
    "dataloader__sampler__shuffle": True,
    "training__steps": 5,
    "training__seq_len": 64,
    "checkpoint__interval": 2,
    "debug__ledger": True,
}


def ledger_of(dump: Path) -> list[str]:
    return (dump / "ledger.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("kto", {"dataloader__num_workers": 1}),
        ("dpo", {"reference__kind": "cached", "training__local_batch_size": 2}),
    ],
)
def test_preference_runs_resume_exactly(hub, folder, tmp_path, config, options):  # noqa: F811
    write(hub / "questions", list(map(pair_of, range(16))))
    options = {**STREAMED, "dataloader__dataset": ["hub/questions"], **options}
    options |= {"training__global_batch_size": 2}
    test_preference_methods.train(folder, tmp_path / "straight", config, **options)
    with killed_in(PreferenceTrainer, "train_step", 4):
        test_preference_methods.train(folder, tmp_path / "stopped", config, **options)
    test_preference_methods.train(folder, tmp_path / "stopped", config, **options)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert ledger_of(stopped) == ledger_of(straight)
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")
    assert read_metrics(stopped, *names) == read_metrics(straight, *names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rollout__max_staleness": 1},
        {"replay__size": 4, "replay__success": -5.0, "replay__rare": 1.0},
    ],
)
def test_rollouts_resume_exactly(hub, folder, tmp_path, options):  # noqa: F811
    """Rollouts that had begun early begin again with later weights, for the same prompts."""
    write(hub / "prompts", [{"prompt": f"Tell me about {i} cats."} for i in range(12)])
    options = {**STREAMED, "dataloader__dataset": ["hub/prompts"], **options}
    test_rl.train_rl(folder, tmp_path / "straight", **options)
    with killed_in(RLTrainer, "train_step", 4):
        test_rl.train_rl(folder, tmp_path / "stopped", **options)
    test_rl.train_rl(folder, tmp_path / "stopped", **options)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert ledger_of(stopped) == ledger_of(straight)
    if "rollout__max_staleness" not in options:
        names = ("loss", "grad_norm", "reward", "replayed")
        assert read_metrics(stopped, *names) == read_metrics(straight, *names)
