"""The training loss of each dataset of a mixture, compared with validation on that dataset."""

import json

import pytest

from tests.training import flags, read_metrics, run, tiny_config
from torchtitan.config.manager import ConfigManager
from torchtitan.tools.errors import UserError


def _rows(path, word, count):
    rows = [
        {"instruction": f"Say {word} {n}", "output": f"{word} " * (n + 1)} for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def _fine_tune(folder, data, **more):
    options = {
        "dump_folder": folder,
        "dataloader.dataset": data,
        "dataloader.packing": "none",
        "training.steps": 1,
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": 8,
        "training.mixed_precision_param": "float32",
        "validator.enable": True,
        "validator.at_start": True,
        "validator.dataset": data,
        **more,
    }
    words = ["--module", "llama3", "--config", "debugmodel_sft", *flags(options)]
    return run(ConfigManager().parse_args(words).config)


def _first(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(line[name] for line in lines if name in line)


def test_losses_equal_validation_of_each_dataset(tmp_path):
    """The only step reads all rows, before its update; training is unchanged bit for bit."""
    data = [_rows(tmp_path / "a.jsonl", "dog", 3), _rows(tmp_path / "b.jsonl", "garden", 5)]
    _fine_tune(tmp_path / "with", data, **{"metrics.dataset_losses": True})
    _fine_tune(tmp_path / "without", data)
    for name in ("a.jsonl", "b.jsonl"):
        expected = _first(tmp_path / "with", f"validation_loss/{name}")
        # Sums of float32 in another order.
        assert _first(tmp_path / "with", f"loss/{name}") == pytest.approx(expected, rel=1e-6)
    assert _first(tmp_path / "with", "loss/a.jsonl") != _first(tmp_path / "with", "loss/b.jsonl")
    for name in ("loss", "grad_norm"):
        assert read_metrics(tmp_path / "with", name) == read_metrics(tmp_path / "without", name)


def test_windows_of_text_belong_to_their_dataset(tmp_path):
    """A model learns repeated words first."""
    (tmp_path / "easy.txt").write_text("the dog the dog " * 200)
    (tmp_path / "hard.txt").write_text(" ".join(str(n * n % 7919) for n in range(800)))
    run(
        tiny_config(
            tmp_path / "run",
            dataloader__dataset=[tmp_path / "easy.txt", tmp_path / "hard.txt"],
            training__steps=12,
            training__global_batch_size=8,
            optimizer__lr=1e-2,
            metrics__dataset_losses=True,
        )
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    last = [line for line in lines if "loss/easy.txt" in line and "loss/hard.txt" in line][-1]
    assert last["loss/easy.txt"] < 0.7 * last["loss/hard.txt"]
    assert last["loss/easy.txt"] <= last["loss"] <= last["loss/hard.txt"]


def test_own_losses_are_refused(tmp_path):
    words = ["--module", "preference", "--config", "dpo_debugmodel"]
    options = {"dump_folder": tmp_path, "metrics.dataset_losses": True}
    config = ConfigManager().parse_args([*words, *flags(options)]).config
    with pytest.raises(UserError, match="computes its own loss"):
        run(config)
