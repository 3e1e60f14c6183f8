"""`torchtitan run`: stages in order, each on the model of an earlier one; finished stages are not
repeated."""

import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.commands import RunningCommand, run_command
from tests.training import read_metrics
from torchtitan.cli.main import main

TRAIN = (
    "train --module {} --config {} --training.steps {} --training.seq_len 32 "
    "--training.local_batch_size 2 --training.mixed_precision_param float32 --validator.no_enable "
    "--metrics.no_enable_tensorboard --dataloader.dataset stories --checkpoint.enable "
    "--checkpoint.last_save_in_hf"
)
FIRST = (
    TRAIN.format("llama3", "debugmodel", 1)
    + " --model.dim 64 --model.ffn_dim 128 --model.n_layers 1"
)
SECOND = TRAIN.format("auto", "pretrain", 2)
SAMPLES = "generate --prompt Once --max_new_tokens 2"


def write(path: Path, *stages: dict[str, str]) -> Path:
    path.write_text(json.dumps({"stages": stages}))  # JSON is YAML
    return path


@pytest.mark.slow
def test_stages_build_on_each_other_and_are_not_repeated(tmp_path, capsys):
    stages = [
        {"name": "first", "run": FIRST},
        {"name": "second", "run": f"{SECOND} --checkpoint.folder models/saved", "base": "previous"},
        {"name": "samples", "run": SAMPLES, "base": "previous"},
    ]
    recipe, folder = (
        write(tmp_path / "recipe.yaml", *stages[:1], {"name": "wrong", "run": "generate --prompt"}),
        tmp_path,
    )
    assert main(["run", str(recipe), "--folder", str(folder / "out")]) == 2  # of `generate`
    metrics = folder / "out/first/metrics.jsonl"
    written = metrics.stat().st_mtime_ns
    write(recipe, *stages)
    assert main(["run", str(recipe), "--folder", str(folder / "out")]) == 0
    assert metrics.stat().st_mtime_ns == written
    record = json.loads((folder / "out/second/finished.json").read_text())
    assert str(folder / "out/first/checkpoint/step-1") in record["command"]
    text = (folder / "out/samples/output.txt").read_text()
    assert text.startswith("Once") and text in capsys.readouterr().out

    write(recipe, {"name": "first", "run": FIRST + " --optimizer.lr 1e-3"})
    assert main(["run", str(recipe), "--folder", str(folder / "out")]) == 2
    assert "stage 'first' finished with another command or base; remove" in capsys.readouterr().err

    shutil.rmtree(folder / "out/first")
    write(recipe, *stages)
    assert main(["run", str(recipe), "--folder", str(folder / "out")]) == 2
    assert "stage 'second' finished with another command or base; remove" in capsys.readouterr().err


def test_scripts_get_the_folder_and_numbers_that_grow_with_the_hours(tmp_path, capsys):
    script, recipe = tmp_path / "show.py", tmp_path / "recipe.yaml"
    script.write_text("import sys\nprint(*sys.argv[1:])\n")
    numbers = "{400*hours} {1.5e3*sqrt(hours)} {1*hours} {other}"
    run = f"python {script} {{folder}}/x {numbers}"
    recipe.write_text(json.dumps({"hours": 0.25, "stages": [{"name": "show", "run": run}]}))
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["run", str(recipe), "--folder", str(first), "--plan"]) == 0
    assert capsys.readouterr().out.startswith(f"show: python {script} {first}/x 100 750 1 ")
    assert not first.exists()
    assert main(["run", str(recipe), "--folder", str(first)]) == 0
    assert (first / "show/output.txt").read_text() == f"{first}/x 100 750 1 {{other}}\n"
    assert main(["run", str(recipe), "--folder", str(second), "--hours", "4"]) == 0
    assert (second / "show/output.txt").read_text() == f"{second}/x 1600 3000 4 {{other}}\n"
    capsys.readouterr()
    assert main(["run", str(recipe), "--folder", str(first), "--hours", "4"]) == 2
    assert "stage 'show' finished with another command" in capsys.readouterr().err
    script.write_text("raise SystemExit(7)")
    assert main(["run", str(recipe), "--folder", str(tmp_path / "third")]) == 7
    assert not (tmp_path / "third/show/finished.json").exists()


@pytest.mark.parametrize(
    ("hours", "run", "options", "message"),
    [
        ({}, "ls", ["--hours", "2"], "--hours 2: {recipe} has no `hours`"),
        ({}, "ls {3*hours}", [], "stage 1 has {{3*hours}}; set --hours, or `hours` in the recipe"),
        ({"hours": 1}, "ls {hours/3}", [], "stage 1 has {{hours/3}}, but must have {{folder}}"),
        ({"hours": 1}, "ls", ["--hours", "0"], "--hours is 0.0, but must be a number above 0"),
        ({"hours": "two"}, "ls", [], "hours is two, but must be a number above 0"),
        ({"hours": True}, "ls", [], "hours is True, but must be a number above 0"),
    ],
)
def test_wrong_hours_are_rejected(tmp_path, capsys, hours, run, options, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**hours, "stages": [{"name": "a", "run": run}]}))
    assert main(["run", str(recipe), "--folder", str(tmp_path / "out"), *options]) == 2
    assert message.format(recipe=recipe) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stages: []", "has no list `stages`"),
        ("- a", "must map names to values, not be a list"),
        ("{", "is not valid YAML"),
        ("stages: [{name: a}]", "stage 1 must have `name` and `run`"),
        ("stages: [{name: a, run: ls, bsae: previous}]", "stage 1 must have `name` and `run`"),
        ("stages: [{name: ../a, run: ls}]", "stage 1 has the name '../a'"),
        ("stages: [{name: a, run: ls}, {name: a, run: ls}]", "stage 2 has the name 'a'"),
        (
            "stages: [{name: a, run: ls, base: previous}]",
            "stage 'a' has no previous training stage",
        ),
        (
            "stages: [{name: a, run: ls, base: before}]",
            "stage 'a' has base 'before', which is no folder; use previous",
        ),
        (
            "stages: [{name: a, run: ls}, {name: b, run: trainx}]",
            "stage 2 has the unknown command 'trainx'; did you mean 'train'?",
        ),
        (
            "stages: [{name: a, run: train --dump_folder=b}]",
            "stage 'a' has --dump_folder, which the recipe sets",
        ),
        (
            "stages: [{name: a, run: train --hf_assets_path b, base: .}]",
            "stage 'a' has --hf_assets_path, which the recipe sets",
        ),
        (
            "stages: [{name: a, run: eval --checkpoint b, base: .}]",
            "stage 'a' has --checkpoint, which the recipe sets",
        ),
        ("stages: [{name: a, run: 3}]", "stage 1 must have `name` and `run`"),
        ('stages: [{name: a, run: "ls \'"}]', "stage 1 must have `name` and `run`"),
    ],
)
def test_invalid_recipes_are_rejected(tmp_path, capsys, content, message):
    (tmp_path / "recipe.yaml").write_text(content)
    assert main(["run", str(tmp_path / "recipe.yaml"), "--folder", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    recipe = write(tmp_path / "recipe.yaml", {"name": "first", "run": FIRST})
    assert main(["run", str(recipe), "--folder", str(tmp_path / "file")]) == 2
    message = (
        f"--folder: '{tmp_path}/file/first' cannot be written: Not a directory; name another folder"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "null",
        "{}",
        '{"id": 3}',
        '{"command": ["ls"], "base": "", "id": [[]]}',
        "[" * 10**5,
        "9" * 5000,
    ],
)
def test_a_damaged_record_of_a_stage_is_one_line(tmp_path, capsys, content):
    recipe = write(tmp_path / "recipe.yaml", {"name": "first", "run": "ls"})
    record = tmp_path / "out/first/finished.json"
    record.parent.mkdir(parents=True)
    record.write_text(content)
    assert main(["run", str(recipe), "--folder", str(tmp_path / "out")]) == 2
    [*shown, error] = capsys.readouterr().err.splitlines()
    assert error.startswith("torchtitan run: ") and str(record) in error
    assert len(shown) == 2  # the commands of the stages


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "no_last_save_in_hf",
            "it would export no model; add --checkpoint.enable --checkpoint.last_save_in_hf",
        ),
        (
            "last_save_in_f",
            "unknown option --checkpoint.last_save_in_f; did you mean "
            "'--checkpoint.last_save_in_hf'?",
        ),
    ],
)
def test_a_training_stage_with_wrong_options_does_not_start(tmp_path, capsys, wrong, message):
    recipe = write(
        tmp_path / "recipe.yaml", {"name": "first", "run": FIRST.replace("last_save_in_hf", wrong)}
    )
    assert main(["run", str(recipe), "--folder", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(f"\ntorchtitan run: stage 'first': {message}\n")
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe_is_rejected(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.endswith("none.yaml cannot be read: No such file or directory\n")


@pytest.mark.slow
def test_a_recipe_that_is_killed_at_random_moments_ends_the_same(tmp_path):
    """Three kills, each soon after a random amount of progress; then metrics, samples and exported
    weights equal the results of a recipe that was left alone."""
    options = " --checkpoint.interval 2 --metrics.log_freq 1"
    recipe = write(
        tmp_path / "recipe.yaml",
        {"name": "first", "run": FIRST.replace("steps 1 ", "steps 12 ") + options},
        {
            "name": "second",
            "run": SECOND.replace("steps 2 ", "steps 12 ") + options,
            "base": "previous",
        },
        {"name": "samples", "run": SAMPLES, "base": "previous"},
    )

    def command(folder: str) -> list[str | Path]:
        return [sys.executable, "-m", "torchtitan", "run", recipe, "--folder", tmp_path / folder]

    def progress() -> int:
        return sum(
            len(path.read_text().splitlines()) for path in tmp_path.glob("killed/*/metrics.jsonl")
        )

    dice = random.Random(seed := random.randrange(10**6))
    for kill in range(3):
        wanted = progress() + dice.randint(1, 6)
        with RunningCommand(command("killed"), start_new_session=True) as running:
            deadline = time.monotonic() + 120
            while progress() < wanted and running.poll() is None:
                assert time.monotonic() < deadline, f"seed {seed}: no progress before kill {kill}"
                time.sleep(0.01)
            time.sleep(0.2 * dice.random())
            running.kill_group()
    for folder in ("killed", "whole"):
        run_command(command(folder), check=True)
    for stage in ("first", "second"):
        numbers = [
            read_metrics(tmp_path / folder / stage, "loss", "grad_norm")
            for folder in ("killed", "whole")
        ]
        assert numbers[0] == numbers[1] and len(numbers[0]) == 12, f"seed {seed}"
    for name in ("second/checkpoint/step-12/model.safetensors", "samples/output.txt"):
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), f"seed {seed}"


@pytest.mark.slow
def test_a_stage_saves_and_ends_when_its_recipe_is_killed(tmp_path):
    stage = {
        "name": "first",
        "run": FIRST.replace("steps 1 ", "steps 100000 ") + " --metrics.log_freq 1",
    }
    recipe, log = write(tmp_path / "recipe.yaml", stage), tmp_path / "out/first/metrics.jsonl"
    command = [sys.executable, "-m", "torchtitan", "run", recipe, "--folder", tmp_path / "out"]
    with RunningCommand(command, start_new_session=True) as running:
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        running.kill()
        running.wait()
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(running.pid, 0)
                time.sleep(0.05)
    assert list(tmp_path.glob("out/first/checkpoint/step-*"))
