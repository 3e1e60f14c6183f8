"""The training loss of each dataset of a mixture, compared with validation on that dataset."""

import contextlib
import json

import pytest
import torch.distributed as dist

from tests.processes import run_processes
from tests.training import flags, read_metrics, run, tiny_config, train
from torchtitan.components.checkpoint import list_checkpoints
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.template.trainer import TemplateTrainer
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


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


def test_a_step_that_does_not_record_is_refused(tmp_path):
    class OwnStep(Trainer):
        def update(self, micro_batches):
            self.dataset_losses.of = lambda *_: contextlib.nullcontext()
            return super().update(micro_batches)

    config = tiny_config(tmp_path, metrics__dataset_losses=True)
    with pytest.raises(UserError, match=r"which this trainer's train_step does not record"):
        run(config, OwnStep)


def test_the_template_records(tmp_path):
    config = tiny_config(tmp_path, metrics__dataset_losses=True)
    run(config, TemplateTrainer)
    _assert_losses_of_the_only_set(tmp_path)


def _assert_losses_of_the_only_set(folder):
    """They are the training losses, summed in another order."""
    (line, *_) = (folder / "metrics.jsonl").read_text().splitlines()
    (name,) = (name for name in json.loads(line) if name.startswith("loss/"))
    numbers = read_metrics(folder, name, "loss")
    assert len(numbers) == 4
    assert [own for _, own, _ in numbers] == pytest.approx([all_ for *_, all_ in numbers], rel=1e-6)


class FailingTokens(CrossEntropyLoss):
    """Fails on the second rank in the third of its calls."""

    def __call__(self, *args, **options):
        self.n_calls = getattr(self, "n_calls", 0) + 1
        if self.n_calls == 3 and dist.get_rank() == 1:
            raise ZeroDivisionError("mine")
        return super().__call__(*args, **options)


class Failing(Trainer):
    def build_loss(self):
        loss = super().build_loss()
        loss.__class__ = FailingTokens
        return loss


LAYOUT = {"training__steps": 4, "training__local_batch_size": 1, "training__global_batch_size": 2}


def _on_two_ranks(folder):
    options = {**LAYOUT, "metrics__dataset_losses": True}
    train(
        folder / "cp",
        **{**options, "training__local_batch_size": 2},
        parallelism__data_parallel_shard_degree=1,
        parallelism__context_parallel_degree=2,
    )
    with pytest.raises(UserError, match="rank 1 failed: .*mine"):
        train(
            folder / "failing",
            trainer_class=Failing,
            **options,
            checkpoint__enable=True,
            checkpoint__interval=100,
        )


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """The parts of sequences add up; after a loss that fails on one rank, all save and end."""
    run_processes(_on_two_ranks, 2, tmp_path)
    _assert_losses_of_the_only_set(tmp_path / "cp")
    assert [info.step for info in list_checkpoints(tmp_path / "failing" / "checkpoint")] == [2]


def test_own_losses_are_refused(tmp_path):
    words = ["--module", "preference", "--config", "dpo_debugmodel"]
    options = {"dump_folder": tmp_path, "metrics.dataset_losses": True}
    config = ConfigManager().parse_args([*words, *flags(options)]).config
    with pytest.raises(UserError, match="computes its own loss"):
        run(config)
