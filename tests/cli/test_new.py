"""`torchtitan new`: its copies run unchanged and compute exactly the numbers of the built-in
run."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import RunningCommand
from tests.training import flags, read_metrics, read_validation
from torchtitan.cli.main import main
from torchtitan.models.llama3.config_registry import llama3_debugmodel

NUMBERS = ("loss", "grad_norm", "lr", "n_tokens_seen")
TINY = {
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.n_layers": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 3,
    "metrics.log_freq": 1,
}


pytestmark = pytest.mark.usefixtures("empty_folder")


def train(folder: str, *arguments: str, **options) -> Path:
    """Train through the command line; return the dump folder."""
    words = flags(
        {"dump_folder": folder, **{key.replace("__", "."): value for key, value in options.items()}}
    )
    assert main(["train", *arguments, *words]) == 0
    return Path(folder)


def assert_same_numbers(run: Path, expected: Path, n_steps: int) -> None:
    """Compare to the last bit; metrics.jsonl has full precision."""
    assert read_metrics(run, *NUMBERS) == read_metrics(expected, *NUMBERS)
    assert read_metrics(run)[-1] == (n_steps,)
    assert read_validation(run) == read_validation(expected) != []


# --- the experiment
# --------------------------------------------------------------------------------------------------


def test_experiment_matches_the_built_in_run(capsys):
    assert main(["new", "my_experiment"]) == 0
    assert "torchtitan train --module my_experiment --config debugmodel" in capsys.readouterr().out
    settings = {
        "training.global_batch_size": 4,  # accumulated from two micro-batches
        "training.mixed_precision_param": "bfloat16",
        "training.max_norm": 0.5,  # below the norms of these steps: clipped
    }
    own = train("own", "--module", "my_experiment", "--config", "debugmodel", **TINY, **settings)
    built_in = train("built_in", **TINY, **settings)
    assert_same_numbers(own, built_in, 3)
    assert all(norm > 0.5 for _, norm in read_metrics(own, "grad_norm"))
    assert "module: my_experiment\nconfig: debugmodel\n" in (own / "config.yaml").read_text()


def test_experiment_has_the_debug_configuration():
    from torchtitan.experiments.template.config_registry import template_debugmodel

    assert template_debugmodel().to_dict() == llama3_debugmodel().to_dict()


def test_experiment_does_not_mention_the_template():
    assert main(["new", "some/where/my_second_try"]) == 0
    folder = Path("some/where/my_second_try")
    assert sorted(path.name for path in folder.iterdir()) == [
        "__init__.py",
        "config_registry.py",
        "trainer.py",
    ]
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    assert "template" not in text.lower()
    assert "torchtitan new" not in text
    assert "class MySecondTryTrainer(Trainer)" in text
    assert "def my_second_try_debugmodel() -> MySecondTryTrainer.Config" in text
    for step in ("zero_grad()", ".backward()", "clip_gradients()", "optimizer.step()"):
        assert step in text


def test_edited_experiment_runs_its_own_step():
    """The training step of the copy is the one that runs."""
    main(["new", "halved"])
    trainer = Path("halved/trainer.py")
    code = trainer.read_text()
    edited = code.replace("mean_loss = summed_loss", "mean_loss = 0.5 * summed_loss")
    assert edited != code
    trainer.write_text(edited)
    own = train("own", "--module", "halved", **TINY)
    ((_, loss, norm), *_), ((_, full_loss, full_norm), *_) = (
        read_metrics(folder, "loss", "grad_norm") for folder in (own, train("built_in", **TINY))
    )
    assert (loss, norm) == (full_loss / 2, full_norm / 2)


# --- the plain loop
# --------------------------------------------------------------------------------------------------


def new_plain_loop(edit: Callable[[str], str] = lambda code: code) -> Path:
    assert main(["new", "--plain-loop", "my_loop.py"]) == 0
    path = Path("my_loop.py")
    path.write_text(edit(path.read_text()))
    return path


def run_plain_loop(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")


def shrunk(code: str) -> str:
    """The loop on small batches, logging every step and saving often."""
    for old, new in {
        "SEQ_LEN = 256": "SEQ_LEN = 32",
        "BATCH_SIZE = 8": "BATCH_SIZE = 2",
        "MetricsProcessor.Config()": "MetricsProcessor.Config(log_freq=1)",
        "Validator.Config(freq=50, steps=10)": "Validator.Config(freq=10, steps=2)",
        "interval=50": "interval=10",
    }.items():
        assert old in code
        code = code.replace(old, new)
    return code


@pytest.mark.slow
def test_plain_loop_matches_the_built_in_run(monkeypatch):
    run_plain_loop(new_plain_loop(), monkeypatch, "--steps", "3", "--folder", "own")
    assert_same_numbers(Path("own"), train("built_in", training__steps=3), 3)


@pytest.mark.slow
def test_plain_loop_matches_the_whole_schedule(monkeypatch):
    run_plain_loop(new_plain_loop(shrunk), monkeypatch, "--steps", "20", "--folder", "own")
    settings = {"training__seq_len": 32, "training__local_batch_size": 2, "training__steps": 20}
    settings |= {"metrics__log_freq": 1, "validator__freq": 10, "validator__steps": 2}
    assert_same_numbers(Path("own"), train("built_in", **settings), 20)
    assert len(read_validation(Path("own"))) == 2


@pytest.mark.slow
def test_plain_loop_resumes_exactly_after_a_kill(monkeypatch):
    path = new_plain_loop(shrunk)
    run_plain_loop(path, monkeypatch, "--steps", "40", "--folder", "straight")
    command = [sys.executable, str(path), "--steps", "40", "--folder", "killed"]
    process = RunningCommand(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_step(Path("killed"), 12, process)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    run = Path("killed")
    (killed_at,) = read_metrics(run)[-1]
    saved = max(
        int(folder.name.removeprefix("step-"))
        for folder in (run / "checkpoint").glob("step-*[0-9]")
    )
    assert 10 <= saved < 40 and killed_at < 40
    run_plain_loop(path, monkeypatch, "--steps", "40", "--folder", "killed")
    assert_same_numbers(run, Path("straight"), 40)


def wait_for_step(folder: Path, step: int, process: RunningCommand) -> None:
    """Wait until the run has logged the step."""
    for _ in range(6000):
        if (folder / "metrics.jsonl").exists() and f'"step": {step}, "loss"' in (
            folder / "metrics.jsonl"
        ).read_text():
            return
        assert process.poll() is None, "the run exited early"
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached within a minute")


@pytest.mark.slow
def test_plain_loop_on_local_text_with_traces(monkeypatch):
    """A text without a validation split; the trace is of step 10."""
    Path("my.txt").write_text("It was the best of times, it was the worst of times. " * 50)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(Path("cache").absolute()))
    run_plain_loop(
        new_plain_loop(shrunk), monkeypatch, "--steps", "12", "--dataset", "my.txt", "--profile"
    )
    run = Path("outputs/plain_loop")
    losses = [loss for _, loss in read_metrics(run, "loss")]
    assert losses[-1] < losses[0] - 1
    assert read_validation(run) == []
    assert (run / "profile_traces/step-10/rank0.json").stat().st_size > 0


def test_plain_loop_is_short():
    lines = new_plain_loop().read_text().splitlines()
    assert len(lines) < 160
    loop = lines[next(number for number, line in enumerate(lines) if "for step in range" in line) :]
    calls = [
        "next(loader)",
        "train_step(",
        "log_step(",
        "checkpoints.save(",
        "validator.validate()",
        "profiler.step(",
    ]
    assert [sum(call in line for line in loop) for call in calls] == [1] * len(calls)


# --- errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["taken"], ["--plain-loop", "taken"]])
def test_existing_folder_is_not_overwritten(arguments, capsys):
    Path("taken").mkdir()
    Path("taken/work.py").write_text("mine")
    assert main(["new", *arguments]) == 2
    assert "'taken' already exists" in capsys.readouterr().err
    assert [path.name for path in Path("taken").iterdir()] == ["work.py"]


def test_existing_script_is_not_overwritten(capsys):
    Path("my_loop.py").write_text("mine")
    assert main(["new", "--plain-loop", "my_loop.py"]) == 2
    assert "'my_loop.py' already exists" in capsys.readouterr().err
    assert Path("my_loop.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["my-experiment", "2nd", "class", "a.b", "_hidden"])
def test_invalid_package_name(name, capsys):
    assert main(["new", name]) == 2
    assert re.search(
        f"'{re.escape(name)}' cannot be the name of a public Python package",
        capsys.readouterr().err,
    )
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("name", ["llama3", "template", "json"])
def test_name_of_an_existing_module(name, capsys):
    assert main(["new", name]) == 2
    assert f"'{name}' is the name of an existing module" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [["file/experiment"], ["--plain-loop", "file/loop.py"]])
def test_unwritable_destination(arguments, capsys):
    Path("file").write_text("")
    assert main(["new", *arguments]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_path_is_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["new"])
    assert ended.value.code == 2
    assert "path" in capsys.readouterr().err
