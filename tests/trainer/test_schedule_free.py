"""Runs with ScheduleFreeAdamW: validation, checkpoints and exports have the averages, and resuming
continues with the trained weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.processes import run_processes
from tests.training import killed_in, read_metrics, read_validation, train
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

OPTIONS = {
    "optimizer__name": "ScheduleFreeAdamW",
    "optimizer__lr": 5e-3,
    "lr_scheduler__decay_ratio": 0.0,
    "training__mixed_precision_param": "float32",
    "training__steps": 6,
}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2}
VALIDATING = {"validator__enable": True, "validator__freq": 2, "validator__steps": 2}


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    state = ModelState(trainer.model_parts).state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def averages_of(trainer: Trainer) -> dict[str, Tensor]:
    """x of the paper in float64, from y and z: y = (1 - beta1) z + beta1 x."""
    (optimizer,) = trainer.optimizer.optimizers
    (model,) = trainer.model_parts
    averages = {}
    for name, y in model.named_parameters():
        z = optimizer.state[y]["z"].double()
        averages[name] = (y.detach().double() - 0.1 * z) / 0.9
    return averages


def assert_averages(weights: dict[str, Tensor], trainer: Trainer) -> None:
    averages, trained = averages_of(trainer), weights_of(trainer)
    assert any((weights[name] - trained[name]).abs().max() > 1e-3 for name in averages)
    for name, average in averages.items():
        # One float32 operation on z - y.
        torch.testing.assert_close(weights[name].double(), average, rtol=1e-6, atol=1e-7)


def saved(folder: Path) -> dict[str, Tensor]:
    source = DcpSource(folder)
    return {name: source.read(name) for name in source.specs}


def test_checkpoint_and_export_have_averages(tmp_path):
    trainer = train(tmp_path, **OPTIONS, **SAVING, **VALIDATING, checkpoint__last_save_in_hf=True)
    (export,) = (tmp_path / "checkpoint" / "step-6").rglob("*.safetensors")
    exported = load_file(export)
    embedding = {"tok_embeddings.weight": exported["model.embed_tokens.weight"].float()}
    averages = averages_of(trainer)["tok_embeddings.weight"]
    torch.testing.assert_close(
        embedding["tok_embeddings.weight"].double(), averages, rtol=1e-6, atol=1e-7
    )
    full = train(tmp_path / "full", **OPTIONS, **SAVING)
    assert_averages(saved(tmp_path / "full" / "checkpoint" / "step-6"), full)
    # The validations did not change the weights.
    assert all(
        torch.equal(value, weights_of(full)[name]) for name, value in weights_of(trainer).items()
    )


def test_validation_measures_averages(tmp_path):
    train(tmp_path / "run", **OPTIONS, **SAVING, **VALIDATING)
    # A run from the saved weights, which validates before its first step.
    train(
        tmp_path / "other",
        **{**OPTIONS, "optimizer__name": "AdamW", "optimizer__lr": 0.0, "training__steps": 1},
        **VALIDATING,
        validator__at_start=True,
        checkpoint__enable=True,
        checkpoint__initial_load_path=str(tmp_path / "run" / "checkpoint" / "step-6"),
        checkpoint__initial_load_model_only=True,
    )
    of_run = dict(read_validation(tmp_path / "run"))[6]
    assert dict(read_validation(tmp_path / "other"))[0] == pytest.approx(of_run, rel=1e-6)
    trained = dict(read_metrics(tmp_path / "run", "loss"))
    assert trained[6] < trained[1]


def test_resumes_bit_identically(tmp_path):
    straight = train(tmp_path / "straight", **OPTIONS, **SAVING)
    with killed_in(Trainer, "train_step", 6):
        train(tmp_path / "resumed", **OPTIONS, **SAVING, checkpoint__async_mode="async")
    resumed = train(tmp_path / "resumed", **OPTIONS, **SAVING)
    (first,), (second,) = straight.optimizer.optimizers, resumed.optimizer.optimizers
    assert all(map(torch.equal, weights_of(straight).values(), weights_of(resumed).values()))
    for one, other in zip(first.state.values(), second.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("before", "after"), [("AdamW", "ScheduleFreeAdamW"), ("ScheduleFreeAdamW", "AdamW")]
)
def test_state_of_another_optimizer_is_refused(tmp_path, before, after):
    train(tmp_path, **{**OPTIONS, "optimizer__name": before, "training__steps": 2}, **SAVING)
    with pytest.raises(UserError, match="optimizer"):
        train(tmp_path, **{**OPTIONS, "optimizer__name": after, "training__steps": 4}, **SAVING)


def test_without_its_state_training_begins_with_the_averages(tmp_path):
    first = train(tmp_path, **{**OPTIONS, "training__steps": 2}, **SAVING)
    expected = averages_of(first)

    class Kept(Trainer):
        def load_checkpoint(self):
            super().load_checkpoint()
            self.loaded_weights = weights_of(self)

    second = train(
        tmp_path,
        trainer_class=Kept,
        **{**OPTIONS, "training__steps": 3},
        **SAVING,
        checkpoint__exclude_from_loading=["optimizer"],
    )
    for name, average in expected.items():
        weight = second.loaded_weights[name].double()
        torch.testing.assert_close(weight, average, rtol=1e-6, atol=1e-7)
    (optimizer,) = second.optimizer.optimizers
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def finish(folder: Path, options: dict) -> None:
    train(folder, **OPTIONS, **SAVING, **options)


@pytest.mark.slow
def test_resumes_on_two_processes(tmp_path):
    straight = train(tmp_path / "straight", **OPTIONS, **SAVING)
    with killed_in(Trainer, "train_step", 6):
        train(tmp_path / "run", **OPTIONS, **SAVING)
    run_processes(finish, 2, tmp_path / "run", {"training__local_batch_size": 1})
    resumed = saved(tmp_path / "run" / "checkpoint" / "step-6")
    for name, weight in saved(tmp_path / "straight" / "checkpoint" / "step-6").items():
        # Two ranks sum gradients in another order, for two of six steps.
        torch.testing.assert_close(resumed[name], weight, rtol=1e-3, atol=1e-4)
    assert straight.step == 6


@pytest.mark.slow
def test_clipping_and_early_steps_agree(tmp_path):
    """An update in the backward pass is the same."""
    options = {**OPTIONS, "training__max_norm": "inf", "training__steps": 3}
    normal = train(tmp_path / "normal", **options)
    early = train(tmp_path / "early", **options, optimizer__early_step_in_backward=True)
    assert all(map(torch.equal, weights_of(normal).values(), weights_of(early).values()))
