"""`torchtitan run`: stages in order, each on the model of an earlier one; finished stages are not repeated."""

import json
import shutil
from pathlib import Path

import pytest

from torchtitan.cli.main import main

TRAIN = (
    "train --module {} --config {} --training.steps {} --training.seq_len 32 --training.local_batch_size 2 "
    "--training.mixed_precision_param float32 --validator.no_enable --metrics.no_enable_tensorboard "
    "--dataloader.dataset stories --checkpoint.enable --checkpoint.last_save_in_hf"
)
FIRST = TRAIN.format("llama3", "debugmodel", 1) + " --model.dim 64 --model.ffn_dim 128 --model.n_layers 1"
SECOND = TRAIN.format("auto", "pretrain", 2)
SAMPLES = "generate --prompt Once --max_new_tokens 2"


def write(path: Path, *stages: dict[str, str]) -> Path:
    path.write_text(json.dumps({"stages": stages}))  # JSON is YAML
    return path


@pytest.mark.slow
def test_stages_build_on_each_other_and_are_not_repeated(tmp_path, capsys):
    stages = [
        {"name": "first", "run": FIRST},
        {"name": "second", "run": SECOND, "base": "previous"},
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
    assert "stage 'first' finished with another command line or base; remove" in capsys.readouterr().err

    shutil.rmtree(folder / "out/first")
    write(recipe, *stages)
    assert main(["run", str(recipe), "--folder", str(folder / "out")]) == 2
    assert "stage 'second' finished with another command line or base; remove" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stages: []", "has no list `stages`"),
        ("- a", "has no list `stages`"),
        ("{", "cannot be read"),
        ("stages: [{name: a}]", "stage 1 must have `name` and `run`"),
        ("stages: [{name: a, run: ls, bsae: previous}]", "stage 1 must have `name` and `run`"),
        ("stages: [{name: ../a, run: ls}]", "stage 1 has the name '../a'"),
        ("stages: [{name: a, run: ls}, {name: a, run: ls}]", "stage 2 has the name 'a'"),
        ("stages: [{name: a, run: ls, base: previous}]", "stage 'a' has no previous training stage"),
        ("stages: [{name: a, run: 3}]", "stage 1 must have `name` and `run`"),
        ('stages: [{name: a, run: "ls \'"}]', "stage 1 must have `name` and `run`"),
    ],
)
def test_invalid_recipes_are_rejected(tmp_path, capsys, content, message):
    (tmp_path / "recipe.yaml").write_text(content)
    assert main(["run", str(tmp_path / "recipe.yaml"), "--folder", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_recipe_is_rejected(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
