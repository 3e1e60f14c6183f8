"""`torchtitan ladder`: the plan, runs that are done, the fit, its page, and the report of a run that
was forecast."""

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.training import read_metrics
from torchtitan.cli import ladder as command
from torchtitan.cli import small_runs
from torchtitan.cli.main import main
from torchtitan.cli.report import RunRecord, page, sections
from torchtitan.components.observe.run_events import read_events
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.manager import ConfigManager
from torchtitan.foresight import scaling
from torchtitan.foresight.dial import FORECAST, DialTrainer, announce, cost_of, setting_of
from torchtitan.foresight.loss_law import read_ladder
from torchtitan.tools.errors import UserError

SMALL = ["--module", "llama3", "--width_per_layer", "16"]
VOCABULARY = 2048
"""Tokens of the default tokenizer."""

SCORES = {"evaluation/quiz/centered_accuracy": 0.125, "evaluation/quiz/questions": 8.0}
"""Metrics of the last step of each run; the first one is shown."""

GRID = ["--sizes", "2", "1", "3", "--tokens_per_parameter", "1", "2", "3"]


def parsed(words: list[str]) -> tuple[DialTrainer.Config, Tokenizer]:
    """Return the configuration with the vocabulary of its tokenizer, and that."""
    config = ConfigManager().parse_args(words).config
    tokenizer = config.tokenizer.build(path=config.hf_assets_path)
    return config.resolve(tokenizer), tokenizer


def words_of(out: Path, *words: str) -> list[str]:
    return ["ladder", *SMALL, *GRID, "--out", str(out), *words]


def law(parameters: float, tokens: float) -> float:
    return 1.5 + 40 * parameters**-0.4 + 90 * tokens**-0.3


def finish_all(out: Path, commands: Path) -> None:
    """Write the files of finished runs, with losses of a known law."""
    for line in commands.read_text().splitlines():
        words = shlex.split(line)[2:]
        config, _ = parsed(words)
        cost = cost_of(config)
        folder = Path(config.dump_folder)
        folder.mkdir(parents=True)
        lines = [
            {"step": config.training.steps // 2, "validation_loss": 9.0},
            {"step": config.training.steps, "validation_loss": law(cost.parameters, cost.tokens)},
            {"step": config.training.steps, **SCORES},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ladder")
    assert main(words_of(out, "--commands", str(out / "jobs.sh"))) == 0
    assert len((out / "jobs.sh").read_text().splitlines()) == 9
    finish_all(out, out / "jobs.sh")
    assert main(words_of(out, "--fit", "--forecast", "4")) == 0
    return out


def test_the_plan_tells_the_cost_first(tmp_path, capsys):
    assert main(words_of(tmp_path, "--plan")) == 0
    printed = capsys.readouterr().out
    assert "9 runs: " in printed and "FLOPs" in printed
    assert not any(tmp_path.iterdir())


def test_the_law_of_the_runs_is_found(finished):
    fitted = read_ladder(finished, setting_of(*parsed([*SMALL, "--config", "dial"])))
    assert len(fitted.points) == 9
    # the losses are exact, and the form is the law's: what is left is the end of the descent
    assert fitted.law.loss(5e5, 5e6) == pytest.approx(law(5e5, 5e6), rel=5e-3)
    text = (finished / command.PAGE).read_text()
    assert "forecast of --dial 4" in text and text.count("<circle") == 10
    assert re.search(r"<td>[+-]0.\d\d% fitted over measured, of dial-\d_tokens-\d</td>", text)
    sizes = sorted({point.parameters for point in fitted.points})
    larger = cost_of(parsed([*SMALL, "--config", "dial", "--dial", "4"])[0]).parameters
    assert f"FLOPs, {larger / sizes[2]:.3g} times the parameters of the largest run</td>" in text
    assert "src=" not in text and "<script" not in text
    assert "<th>evaluation/quiz/centered_accuracy</th></tr>" in text
    assert text.count("<td>0.1250</td></tr>") == 9


def test_done_runs_are_skipped_and_other_commands_refused(finished, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # a run that starts would fail
    assert main(words_of(finished)) == 0
    assert "0 of them left" in capsys.readouterr().out
    assert main(words_of(finished, "--optimizer.lr", "1e-3")) == 2
    assert "was trained with another command" in capsys.readouterr().err


def test_a_forecast_run_shows_forecast_and_outcome(finished, tmp_path, capsys):
    words = [*SMALL, "--config", "dial", "--dial", "4", "--ladder", str(finished)]
    config, tokenizer = parsed([*words, "--predict", "false", "--dump_folder", str(tmp_path)])
    announce(config, tokenizer, 1)
    printed = capsys.readouterr().out
    assert "Step Law" in printed and "by 9 runs of" in printed
    assert f"(by the rule {0.58 * cost_of(config).tokens ** 0.571:,.0f})" in " ".join(
        printed.split()
    )
    forecast = json.loads((tmp_path / FORECAST).read_text())
    outcome = 1.01 * forecast["loss"]
    metrics = {"step": 10, "loss": 3.0, "validation_loss": outcome}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    run = RunRecord(tmp_path)
    (rows,) = (part.rows for part in sections([run]) if part.title == "Forecast")
    found = dict(rows)
    place = "inside" if outcome <= forecast["high"] else "outside"
    assert "+1.00%" in found["outcome"] and place in found["outcome"]
    assert "forecast validation loss" in page([run])
    (tmp_path / FORECAST).write_text('{"loss": "high"}')
    assert not [part for part in sections([RunRecord(tmp_path)]) if part.title == "Forecast"]


def test_the_distance_of_the_measured_error_is_told(finished, capsys):
    """With E fixed, two sizes are enough to forecast the third."""
    sizes = sorted(
        {
            cost_of(parsed([*SMALL, "--config", "dial", "--dial", str(n)])[0]).parameters
            for n in (2, 3)
        }
    )
    try:
        assert main(words_of(finished, "--fit", "--irreducible", "1.5")) == 0
        printed = capsys.readouterr().out
        distance = f"at {sizes[1] / sizes[0]:.3g} times the parameters of the next"
        assert re.search(rf"fitted without it: \d+\.\d\d%, {distance}", printed)
    finally:
        assert main(words_of(finished, "--fit", "--forecast", "4")) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "2048"], r"another window \(--window\): 256, and this run has 2048"),
        (["--module", "qwen3"], r"another family \(--module\): torchtitan.models.llama3, and"),
        (["--width_per_layer", "32"], "another width per layer"),
        (["--muon", "true"], r"another optimizer \(--muon\): AdamW, and this run has Muon"),
        (["--optimizer.lr", "1e-3"], r"another base rate \(--optimizer.lr\): .*, and .* has 0.001"),
        (["--dataloader.dataset", "other.txt"], r"another data .*: \['stories'\], and"),
        (["--validator.dataset", "other.txt"], "another held out data"),
        (["--tokenizer.added_tokens", "<new>"], r"another tokenizer \(--hf_assets_path\)"),
    ],
)
def test_a_ladder_of_another_setting_is_refused(finished, tmp_path, words, message):
    own = [*SMALL, "--config", "dial", "--dial", "4", "--ladder", str(finished), *words]
    config, tokenizer = parsed([*own, "--predict", "false", "--dump_folder", str(tmp_path)])
    with pytest.raises(UserError, match=message):
        announce(config, tokenizer, 1)
    assert not (tmp_path / FORECAST).exists()


def test_all_runs_have_the_window_of_the_largest_size(tmp_path, monkeypatch):
    """Dial 7 has a width of 448 and by the rule 256 tokens; dial 8 has 512 and 2,048."""
    rungs = []
    monkeypatch.setattr(command, "_show", rungs.extend)

    def windows_of(*words: str) -> set[tuple[int, int]]:
        rungs.clear()
        sizes = ["--sizes", "2", "7", "--tokens_per_parameter", "20", "--out", str(tmp_path)]
        assert main(["ladder", "--module", "llama3", *sizes, "--plan", *words]) == 0
        configs = [parsed(rung.run.words)[0] for rung in rungs]
        assert [rung.run.setting.window for rung in rungs] == [c.training.seq_len for c in configs]
        return {(config.window, config.training.seq_len) for config in configs}

    assert windows_of() == {(256, 256)}
    assert windows_of("--forecast", "8") == {(2048, 2048)}
    assert windows_of("--forecast", "8", "--window", "512") == {(512, 512)}


def test_an_interrupted_run_of_other_options_or_rules_is_refused(tmp_path, capsys, monkeypatch):
    """The run has written its configuration, and has not finished."""
    sizes = ["--sizes", "1", "--tokens_per_parameter", "2", "--optimizer.lr", "4e-3"]
    words = ["ladder", *SMALL, *sizes, "--out", str(tmp_path / "ladder")]
    assert main([*words, "--commands", str(tmp_path / "jobs.sh")]) == 0
    own = shlex.split((tmp_path / "jobs.sh").read_text())[2:]
    folder = tmp_path / "ladder" / "dial-1_tokens-2"
    folder.mkdir(parents=True)
    resolved = ConfigManager().parse_args(own)
    resolved.config.model_spec.model.vocab_size = VOCABULARY  # as a run writes it
    resolved.config.training.local_batch_size = 1  # as --parallelism.auto may choose
    resolved.save(folder / "config.yaml")
    started = []
    monkeypatch.setattr(small_runs, "run_torchtitan", lambda words, **_: started.append(words))
    with pytest.raises(AttributeError):  # the run has started, and the stand-in returns None
        main(words)
    assert started.pop()[1:] == own
    monkeypatch.setattr(scaling, "BASE_RATE", 2 * scaling.BASE_RATE)
    assert main(words) == 2  # --optimizer.lr is the same, and the weight decay follows the rule
    message = "was begun with another optimizer.weight_decay"
    assert message in capsys.readouterr().err
    assert main([*words, "--optimizer.lr", "2e-3"]) == 2
    assert "another optimizer.lr (0.004), and would continue with 0.002" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(small_runs, "run_torchtitan", lambda words, **_: started.append(words))
    resolved.config.optimizer.param_groups.popitem()  # as a rule with fewer groups
    resolved.save(folder / "config.yaml")
    assert main(words) == 2
    assert "was begun with another optimizer.param_groups" in capsys.readouterr().err
    assert not started


@pytest.fixture
def one_run(tmp_path) -> tuple[list[str], Path]:
    """Words of a ladder of one finished run, and the folder of that run."""
    sizes = ["--sizes", "1", "--tokens_per_parameter", "2"]
    words = ["ladder", *SMALL, *sizes, "--out", str(tmp_path / "ladder")]
    assert main([*words, "--commands", str(tmp_path / "jobs.sh")]) == 0
    finish_all(tmp_path / "ladder", tmp_path / "jobs.sh")
    return words, tmp_path / "ladder" / "dial-1_tokens-2"


def test_a_run_without_a_finite_loss_is_refused_by_name(one_run, capsys):
    words, folder = one_run
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(lines[1]), "validation_loss": None}  # as a run writes NaN
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    assert main([*words, "--fit"]) == 2
    assert f"'{folder}' has no finite validation_loss" in capsys.readouterr().err
    assert not (folder / small_runs.FINISHED).exists()


def test_a_run_of_another_tokenizer_is_not_counted(one_run, capsys):
    """The command is the same, but the files of its tokenizer have changed."""
    words, folder = one_run
    assert main([*words, "--fit"]) == 2
    assert "these are 1, of 1 and 1" in capsys.readouterr().err
    record = json.loads((folder / small_runs.FINISHED).read_text())
    record["setting"]["tokenizer"] = "0" * 64
    (folder / small_runs.FINISHED).write_text(json.dumps(record))
    assert main([*words, "--fit"]) == 2
    assert "was trained with another setting" in capsys.readouterr().err


def test_mistakes_are_named(tmp_path, capsys):
    for words, message in (
        (words_of(tmp_path, "--fit"), "these are 0, of 0 and 0"),
        (words_of(tmp_path, "--validator.enable", "false", "--plan"), "need validation"),
        (words_of(tmp_path, "--dial", "3", "--plan"), "--dial"),
        (["ladder", "--sizes", "0", "--out", str(tmp_path)], "--sizes is 0"),
        (["ladder", *SMALL, "--sizes", "257", "--out", str(tmp_path)], "--sizes is 257"),
        (words_of(tmp_path, "--forecast", "0", "--plan"), "--forecast is 0"),
        (words_of(tmp_path, "--forecast", "300", "--window", "64"), "--forecast is 300"),
        (
            words_of(tmp_path, "--forecast_tokens_per_parameter", "nan"),
            "--forecast_tokens_per_parameter is nan",
        ),
        (words_of(tmp_path, "--irreducible", "-1"), "--irreducible is -1"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())  # no run has begun


def test_a_ladder_that_cannot_be_fitted_is_told_before_it_is_trained(tmp_path, capsys):
    two_sizes = ["ladder", *SMALL, "--sizes", "1", "2", "--out", str(tmp_path), "--plan"]
    assert main(two_sizes) == 0  # and three lengths
    assert "of 3 sizes and 2 lengths, and these are 6, of 2 and 6;" in capsys.readouterr().out
    assert main([*two_sizes, "--irreducible", "1.5"]) == 0
    assert "a fit takes" not in capsys.readouterr().out


def last_saved(folder: Path) -> int:
    """Return the step of a run's newest complete checkpoint."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoint/step-*[0-9]")), default=0)


class Stopped(subprocess.Popen):
    """A run that gets a signal once it has a new checkpoint."""

    signal = signal.SIGTERM

    def wait(self, timeout=None):
        folder = Path(self.args[-1])
        before = last_saved(folder)
        while last_saved(folder) == before and self.poll() is None:
            time.sleep(0.02)
        self.send_signal(self.signal)
        return super().wait(timeout)


@pytest.mark.slow
def test_an_interrupted_ladder_continues(tmp_path, monkeypatch, capsys):
    """The first run is stopped after its first checkpoint, and killed twice after later ones; it
    resumes with the same command, and ends with the loss of a run that was never stopped. A second
    run starts only then."""
    options = ["--training.steps", "120", "--checkpoint.interval", "2", "--validator.steps", "1"]
    options += ["--metrics.log_freq", "1"]

    def words_of(name: str, *ratios: str) -> list[str]:
        sizes = ["--sizes", "1", "--tokens_per_parameter", *ratios]
        return ["ladder", *SMALL, *sizes, "--out", str(tmp_path / name), *options]

    assert main(words_of("whole", "1")) == 2
    words = words_of("stopped", "1", "2")
    first, second = (tmp_path / "stopped" / f"dial-1_tokens-{ratio}" for ratio in (1, 2))
    expected = [
        (signal.SIGTERM, 2, "stopped before its last step, 120"),
        (signal.SIGKILL, 3, "a run was ended by SIGKILL"),
        (signal.SIGKILL, 3, "a run was ended by SIGKILL"),
    ]
    stopped_at = [0]
    for kind, code, message in expected:
        capsys.readouterr()
        monkeypatch.setattr(Stopped, "signal", kind)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", Stopped)
            assert main(words) == code
        assert message in capsys.readouterr().err
        stopped_at.append(last_saved(first))
    assert stopped_at == sorted(set(stopped_at)) and stopped_at[-1] < 120 and not second.exists()
    assert main(words) == 2
    assert "these are 2, of 1 and" in capsys.readouterr().err  # but both have run
    begun = [event["step"] for event in read_events(first, []) if event["event"] == "start"]
    assert begun == stopped_at
    keys = ("loss", "n_tokens_seen")
    whole = tmp_path / "whole" / first.name
    assert read_metrics(first, *keys) == read_metrics(whole, *keys)
    losses = [
        json.loads((folder / small_runs.FINISHED).read_text())["loss"] for folder in (first, whole)
    ]
    assert losses[0] == losses[1] and (second / small_runs.FINISHED).exists()
