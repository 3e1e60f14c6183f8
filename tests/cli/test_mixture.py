"""`torchtitan mixture`: the plan, runs that are done, the fit and the proposal."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.components.data.helpers import write_jsonl
from torchtitan.cli import small_runs
from torchtitan.cli.main import main

TRUE = np.log([6.0, 3.0, 4.0])


@pytest.fixture
def words(tmp_path) -> list[str]:
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} is a letter. " * 50}] * 20)
    data = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    model = ["--module", "llama3", "--width_per_layer", "16", "--tokens_per_parameter", "1"]
    sizes = ["--dial", "1", "--runs", "5", "--out", str(tmp_path / "out")]
    sets = ["--dataloader.dataset", *data, "--validator.dataset", data[1]]
    return ["mixture", *sizes, *model, *sets]


@pytest.fixture
def trained(monkeypatch) -> list[Path]:
    """Instead of training, write losses of a known law; list the folders of the runs."""
    folders = []

    def train(self: small_runs.SmallRun) -> int:
        if self.measured() is None:
            place = self.words.index("--dataloader.weights")
            shares = np.array([int(word) for word in self.words[place + 1 : place + 4]]) / 100
            line = {"step": self.steps, "validation_loss": float(np.exp(shares @ TRUE))}
            self.folder.mkdir(parents=True)
            (self.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            folders.append(self.folder)
        return 0

    monkeypatch.setattr(small_runs.SmallRun, "train", train)
    return folders


def test_the_plan_tells_the_cost_first(words, trained, tmp_path, capsys):
    assert main([*words, "--plan"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "7 runs: " in printed and "then one of" in printed and "34 %" in printed
    assert not trained and not (tmp_path / "out").exists()


def test_runs_are_fitted_checked_and_not_repeated(words, trained, capsys):
    assert main(words) == 0
    assert len(trained) == 8 and trained[0].name == "shares-34-33-33"
    printed = capsys.readouterr().out
    assert "rank correlation 1.00, largest error 0.00%" in printed
    assert printed.count("held-out mixture") == 2 and printed.count("(+0.00%)") == 3
    proposal = trained[-1].name.removeprefix("shares-").replace("-", " ")
    assert f"proposal: --dataloader.weights {proposal}" in printed
    assert int(proposal.split()[1]) > 80  # the second set has the lower loss
    assert main(words) == 0
    assert len(trained) == 8  # all had finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--dataloader.weights", "1", "2"], "is chosen for each run; set --around"),
        (["--around", "1", "0", "1"], "must have 3 weights above 0"),
        (["--runs", "4"], "--runs is 4, but must be from 5 to 10,000 for 3 datasets"),
        (["--runs", "1000000000"], "--runs is 1000000000, but must be from 5 to 10,000"),
        (["--held_out_runs", "20000"], "--held_out_runs is 20000, but must be from 0 to 10,000"),
        (["--budget", "1e9"], "--budget is chosen for each run"),
        (["--dataloader.dataset", "stories"], "a mixture needs several datasets"),
        (["--validator.dataset"], "--validator.dataset is empty; name held-out text"),
    ],
)
def test_mistakes_are_named(words, trained, change, message, capsys):
    assert main([*words, *change, "--plan"]) == 2
    assert message in capsys.readouterr().err
    assert not trained
