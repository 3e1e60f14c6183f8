"""`torchtitan new`: what it copies runs unchanged and gives the numbers of the built-in run."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.commands import RunningCommand
from tests.training import flags, read_metrics, read_validation
from torchtitan.cli.main import main
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.process import COMMAND_VARIABLE

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


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in, one process, and one thread, since sums depend on how many threads share them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv(COMMAND_VARIABLE, "set back afterwards")
    monkeypatch.setattr(sys, "path", list(sys.path))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def train(folder: str, *arguments: str, **options) -> Path:
    """A run through the command line; its folder."""
    words = flags({"dump_folder": folder, **{key.replace("__", "."): value for key, value in options.items()}})
    assert main(["train", *arguments, *words]) == 0
    return Path(folder)


def assert_same_numbers(run: Path, expected: Path, n_steps: int) -> None:
    """To the last bit, since metrics.jsonl has full precision."""
    assert read_metrics(run, *NUMBERS) == read_metrics(expected, *NUMBERS)
    assert read_metrics(run)[-1] == (n_steps,)
    assert read_validation(run) == read_validation(expected) != []


# --- the experiment ---------------------------------------------------------------------------------------------------


def test_the_experiment_gives_the_numbers_of_the_built_in_run(capsys):
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


def test_the_experiment_has_the_configuration_of_the_debug_model():
    from torchtitan.experiments.template.config_registry import template_debugmodel

    assert template_debugmodel().to_dict() == llama3_debugmodel().to_dict()


def test_the_experiment_is_written_as_the_user_s_own():
    assert main(["new", "some/where/my_second_try"]) == 0
    folder = Path("some/where/my_second_try")
    assert sorted(path.name for path in folder.iterdir()) == ["__init__.py", "config_registry.py", "trainer.py"]
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    assert "template" not in text.lower()
    assert "torchtitan new" not in text
    assert "class MySecondTryTrainer(Trainer)" in text
    assert "def my_second_try_debugmodel() -> MySecondTryTrainer.Config" in text
    for step in ("zero_grad()", ".backward()", "clip_gradients()", "optimizer.step()"):
        assert step in text


def test_an_edited_experiment_does_what_it_says():
    """What the copy is for: its step is the one that is run."""
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


# --- the plain loop ---------------------------------------------------------------------------------------------------


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
        "SEQ_LEN, BATCH_SIZE, MAX_NORM, SEED = 256, 8,": "SEQ_LEN, BATCH_SIZE, MAX_NORM, SEED = 32, 2,",
        "MetricsProcessor.Config()": "MetricsProcessor.Config(log_freq=1)",
        "Validator.Config(freq=50, steps=10)": "Validator.Config(freq=10, steps=2)",
        "interval=50": "interval=10",
    }.items():
        assert old in code
        code = code.replace(old, new)
    return code


def test_the_plain_loop_gives_the_numbers_of_the_built_in_run(monkeypatch):
    run_plain_loop(new_plain_loop(), monkeypatch, "--steps", "3", "--folder", "own")
    assert_same_numbers(Path("own"), train("built_in", training__steps=3), 3)


def test_the_plain_loop_follows_the_built_in_run_through_the_whole_schedule(monkeypatch):
    run_plain_loop(new_plain_loop(shrunk), monkeypatch, "--steps", "40", "--folder", "own")
    settings = {"training__seq_len": 32, "training__local_batch_size": 2, "training__steps": 40}
    settings |= {"metrics__log_freq": 1, "validator__freq": 10, "validator__steps": 2}
    assert_same_numbers(Path("own"), train("built_in", **settings), 40)
    assert len(read_validation(Path("own"))) == 4


def test_the_plain_loop_resumes_exactly_after_a_kill(monkeypatch):
    path = new_plain_loop(shrunk)
    run_plain_loop(path, monkeypatch, "--steps", "60", "--folder", "straight")
    command = [sys.executable, str(path), "--steps", "60", "--folder", "killed"]
    process = RunningCommand(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(Path("killed"), 24, process)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    run = Path("killed")
    (killed_at,) = read_metrics(run)[-1]
    saved = max(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoint").glob("step-*[0-9]"))
    assert 20 <= saved < 60 and killed_at < 60
    run_plain_loop(path, monkeypatch, "--steps", "60", "--folder", "killed")
    assert_same_numbers(run, Path("straight"), 60)


def wait_for_step(folder: Path, step: int, process: RunningCommand) -> None:
    """Until the run has logged the step."""
    for _ in range(6000):
        if (folder / "metrics.jsonl").exists() and f'"step": {step}, "loss"' in (folder / "metrics.jsonl").read_text():
            return
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached within a minute")


def test_the_plain_loop_on_own_text_with_traces(monkeypatch):
    """A text without a validation split; the trace is of step 10."""
    Path("my.txt").write_text("It was the best of times, it was the worst of times. " * 50)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(Path("cache").absolute()))
    run_plain_loop(new_plain_loop(shrunk), monkeypatch, "--steps", "12", "--dataset", "my.txt", "--profile")
    run = Path("outputs/plain_loop")
    losses = [loss for _, loss in read_metrics(run, "loss")]
    assert losses[-1] < losses[0] - 1
    assert read_validation(run) == []
    assert (run / "profile_traces/step-10/rank0.json").stat().st_size > 0


def test_the_plain_loop_is_short_and_does_one_thing_per_line():
    lines = new_plain_loop().read_text().splitlines()
    assert len(lines) < 150
    loop = lines[next(number for number, line in enumerate(lines) if "for step in range" in line) :]
    calls = ["next(loader)", "train_step(", "log_step(", "checkpoints.save(", "validator.validate()", "profiler.step("]
    assert [sum(call in line for line in loop) for call in calls] == [1] * len(calls)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["taken"], ["--plain-loop", "taken"]])
def test_what_exists_is_left_alone(arguments, capsys):
    Path("taken").mkdir()
    Path("taken/work.py").write_text("mine")
    assert main(["new", *arguments]) == 2
    assert "'taken' exists already" in capsys.readouterr().err
    assert [path.name for path in Path("taken").iterdir()] == ["work.py"]


def test_an_existing_script_is_left_alone(capsys):
    Path("my_loop.py").write_text("mine")
    assert main(["new", "--plain-loop", "my_loop.py"]) == 2
    assert "'my_loop.py' exists already" in capsys.readouterr().err
    assert Path("my_loop.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["my-experiment", "2nd", "class", "a.b", "_hidden"])
def test_a_name_that_no_package_can_have(name, capsys):
    assert main(["new", name]) == 2
    assert re.search(f"'{re.escape(name)}' cannot be the name of a public Python package", capsys.readouterr().err)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("name", ["llama3", "template", "json"])
def test_a_name_that_another_module_has(name, capsys):
    assert main(["new", name]) == 2
    assert f"'{name}' is the name of a module that exists already" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [["file/experiment"], ["--plain-loop", "file/loop.py"]])
def test_a_place_that_cannot_be_written(arguments, capsys):
    Path("file").write_text("")
    assert main(["new", *arguments]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_path_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["new"])
    assert ended.value.code == 2
    assert "path" in capsys.readouterr().err
