"""Disk space: checkpoints that do not fit are found early, and a last save that fails keeps what it
can."""

import logging
import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import run_processes
from tests.training import run, tiny_config, train
from torchtitan.components.checkpoint import ModelState, list_checkpoints, load_model_state, verify
from torchtitan.components.checkpoint import space as disk_space
from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.checkpoint.saver import CheckpointSaveError
from torchtitan.components.observe.run_events import read_events
from torchtitan.components.peft import QLoRA
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

DISK_BYTES = 24 * 2**20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs privileges: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def saving(folder: Path, **options: object):
    return tiny_config(folder, checkpoint__enable=True, **options)


def size_of(checkpoint: Path) -> int:
    return sum(LocalFolder(checkpoint).files().values())


def assert_size_is_predicted(folder: Path, **layout: int) -> None:
    """Compare the predicted with the saved size, in all of several processes."""
    predicted: list[int] = []

    class Predicting(Trainer):
        def train(self) -> None:
            self.load_checkpoint()
            manager = self.checkpointer
            predicted.append(disk_space.total_bytes(manager._encode("full"), manager._ranks))
            super().train()

    options = {f"parallelism__{name}": degree for name, degree in layout.items()}
    train(folder, trainer_class=Predicting, checkpoint__enable=True, training__steps=1, **options)
    # Files also have the names of tensors, and the state of the random numbers as text.
    assert 0 <= size_of(folder / "checkpoint/step-1") - predicted[0] < 0.15 * predicted[0]


def test_size_is_predicted(tmp_path):
    assert_size_is_predicted(tmp_path)


def test_the_size_of_an_export_is_predicted(tmp_path):
    """QLoRA trains and saves few bits, and exports merged weights, which are wide."""
    options = {
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "model__ffn_dim": 2048,
    }
    trainer = train(tmp_path, QLoRA.Config(rank=1), training__steps=1, **options)
    manager = trainer.checkpointer
    weights = {"model": manager.states["model"].state_dict()}
    written = (tmp_path / "checkpoint/step-1/model.safetensors").stat().st_size
    assert written > 1.2 * disk_space.total_bytes(weights, manager._ranks)
    assert 0 <= written - manager._exported_bytes < 0.05 * written  # the header


def predict_in_processes(folder: Path, layout: dict[str, int]) -> None:
    assert_size_is_predicted(folder, **layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data_parallel_replicate_degree": 2},
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 2},
    ],
)
def test_size_is_predicted_for_a_layout(tmp_path, layout):
    run_processes(predict_in_processes, 2, tmp_path, layout)


@pytest.mark.parametrize(
    ("free", "options", "expected"),
    [
        (0.9, {}, "error"),
        (1.1, {}, "fits"),  # the last step only
        (2.9, {"interval": 1}, "warning"),  # steps 1 to 4; two are kept while another is written
        (3.1, {"interval": 1}, "fits"),
        (3.9, {"interval": 1, "keep_latest_k": 0}, "warning"),
        (4.1, {"interval": 1, "keep_latest_k": 0}, "fits"),
        (0.6, {"last_save_model_only": True}, "fits"),
        (0.3, {"last_save_model_only": True}, "error"),
        (0.6, {"last_save_in_hf": True}, "error"),  # a copy, and the files for export
        (0.9, {"last_save_in_hf": True}, "fits"),
        (0.4, {"last_save_in_hf": True, "export_dtype": "bfloat16"}, "fits"),
        (0.3, {"last_save_in_hf": True, "export_dtype": "bfloat16"}, "error"),
        (0.2, {"last_save_model_only": True, "export_dtype": "float16"}, "fits"),
        (0.1, {"last_save_model_only": True, "export_dtype": "float16"}, "error"),
        (1.2, {"last_save_in_hf": True, "interval": 3}, "warning"),
        (0.9, {"last_save_in_hf": True, "interval": 3}, "error"),
    ],
)
def test_space_is_compared_before_the_first_step(
    tmp_path, monkeypatch, warnings, free, options, expected
):
    """`free` counts full checkpoints; the weights are a third of one."""
    config = saving(
        tmp_path,
        **{f"checkpoint__{name}": value for name, value in {"keep_latest_k": 2, **options}.items()},
    )
    trainer = config.build()
    try:
        trainer.load_checkpoint()
        manager = trainer.checkpointer
        n_free = int(free * disk_space.total_bytes(manager._encode("full"), manager._ranks))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, n_free))
        if expected == "error":
            with pytest.raises(
                UserError,
                match=r"takes \d+\.\d\d MiB, but the disk of .* has only \d+\.\d\d MiB free",
            ):
                trainer.train()
            assert (
                not (tmp_path / "metrics.jsonl").exists()
                or not (tmp_path / "metrics.jsonl").read_text()
            )
            return
        manager.check_space(0, 4)
        assert ("upcoming checkpoints take up to" in warnings.text) == (expected == "warning")
    finally:
        trainer.close()


def test_a_run_that_does_not_fit_ends_before_its_first_step(disk, tmp_path):
    (disk / "ballast").write_bytes(bytes(DISK_BYTES - 2**20))
    with pytest.raises(
        UserError, match=f"--checkpoint.folder: a checkpoint takes .* the disk of {disk}"
    ):
        run(saving(tmp_path / "out", checkpoint__folder=str(disk / "saved")))


class Filling(Trainer):
    """Fills the disk in step 3, except for the space of the weights."""

    n_left = 0
    ballast: Path

    def train_step(self, batches):
        if self.step == 2:
            free = shutil.disk_usage(self.ballast.parent).free
            self.ballast.write_bytes(bytes(free - self.n_left))
        return super().train_step(batches)


def filling(ballast: Path, n_left: int) -> type[Trainer]:
    return type("Filling", (Filling,), {"ballast": ballast, "n_left": n_left})


def test_a_last_save_that_fails_keeps_the_weights(disk, tmp_path, monkeypatch):
    """The message names the saved files, the step, and the command to repeat the rest, which
    works."""
    monkeypatch.setenv("TORCHTITAN_COMMAND", "the command")
    options = {"checkpoint__folder": str(disk / "saved"), "checkpoint__interval": 2}
    with pytest.raises(CheckpointSaveError) as caught:
        run(saving(tmp_path, **options), filling(disk / "ballast", 4 * 2**20))
    weights = disk / "saved/weights_only/step-4"
    assert "step-4 could not be saved: OSError: [Errno 28] No space left" in str(caught.value)
    assert f"its weights alone are saved in {weights}" in str(caught.value)
    assert str(caught.value).endswith(
        "To repeat the steps after step 2, free space and run: the command"
    )
    assert verify(weights) == [] and [info.step for info in list_checkpoints(disk / "saved")] == [2]
    (disk / "ballast").unlink()
    trainer = run(saving(tmp_path, **options))
    model = ModelState(trainer.model_parts)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    load_model_state(weights, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), (
            "the saved weights equal the repeated steps' weights"
        )


def test_a_last_save_that_fails_without_any_space_says_so(disk, tmp_path):
    options = {"checkpoint__folder": str(disk / "saved")}
    with pytest.raises(
        CheckpointSaveError,
        match="nothing of this step is saved. To repeat the steps after step 0, free",
    ):
        run(saving(tmp_path, **options), filling(disk / "ballast", 0))


def test_a_last_save_that_fails_goes_to_the_fallback_folder(disk, tmp_path):
    saved, fallback = disk / "saved", tmp_path / "fallback"
    options = {"checkpoint__folder": str(saved), "checkpoint__fallback_folder": str(fallback)}
    with pytest.raises(
        CheckpointSaveError,
        match=f"is saved in {fallback}/step-4 instead; move that folder to {saved}",
    ):
        run(saving(tmp_path, **options), filling(disk / "ballast", 0))
    (disk / "ballast").unlink()
    with pytest.raises(UserError, match="step-4 is a newer checkpoint of this run than those in"):
        run(saving(tmp_path, **options))
    saved.mkdir(exist_ok=True)
    shutil.move(fallback / "step-4", saved / "step-4")
    assert run(saving(tmp_path, **options)).step == 4
    # The checkpoint of another run is neither replaced nor resumed from; the weights find another
    # place.
    shutil.copytree(saved / "step-4", fallback / "step-4")
    other = {**options, "checkpoint__folder": str(disk / "other"), "model__ffn_dim": 64}
    with pytest.raises(
        CheckpointSaveError, match=f"weights alone are saved in {fallback}/weights_only/step-4"
    ):
        run(saving(tmp_path / "other", **other), filling(disk / "ballast", 0))
    assert verify(fallback / "step-4") == []


@pytest.mark.parametrize("saves", [False, True])
def test_a_dump_folder_that_is_removed_is_one_line(tmp_path, warnings, saves):
    class Removing(Trainer):
        def train_step(self, batches):
            if self.step == 2:
                shutil.rmtree(tmp_path / "out")
            return super().train_step(batches)

    run(tiny_config(tmp_path / "out", checkpoint__enable=saves), Removing)
    (line,) = [
        record.getMessage() for record in warnings.records if record.levelno >= logging.WARNING
    ]
    assert line.startswith(f"--dump_folder '{tmp_path / 'out'}' was removed during the run")
    assert (
        not read_events(tmp_path / "out")
        and os.path.exists(tmp_path / "out/checkpoint/step-4") == saves
    )
