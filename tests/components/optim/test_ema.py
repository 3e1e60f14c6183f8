"""`--ema`: averages of weights, compared with a float64 formula over the weights of each step."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import run_processes
from tests.training import killed_in, read_validation, tiny_config, train
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.peft import LoRA
from torchtitan.dry_run import dry_run
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

OPTIONS = {
    "training__steps": 6,
    "ema__decay": 0.3,
    "training__mixed_precision_param": "float32",
    "optimizer__lr": 1e-2,
}
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2}


class Recorder(Trainer):
    """Records the trained weights before the first and after each step, in full."""

    def load_checkpoint(self):
        super().load_checkpoint()
        self.history = [self.trained()]

    def complete_step(self, outcome):
        super().complete_step(outcome)
        self.history.append(self.trained())

    def trained(self):
        state = ModelState(self.model_parts)
        return {
            name: full(value)
            for name, value in state.state_dict().items()
            if name not in state.frozen
        }


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double()


def reference(history: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    averages = dict(history[0])
    for n, weights in enumerate(history[1:], start=1):
        d = min(decay, n / (9 + n))
        averages = {
            name: d * average + (1 - d) * weights[name] for name, average in averages.items()
        }
    return averages


def check(trainer: Recorder, decay: float = 0.3) -> None:
    averages = {
        name: full(value) for name, value in trainer.ema.state_dict().items() if name != "n_updates"
    }
    expected = reference(trainer.history, decay)
    assert averages.keys() == expected.keys() and averages
    for name, average in averages.items():
        # Each float32 update rounds to 6e-8 of a weight.
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)
    assert any((averages[name] - trainer.history[-1][name]).abs().max() > 1e-4 for name in averages)


@pytest.mark.parametrize("lora", [False, True])
def test_equals_float64(tmp_path, lora):
    """Of all weights, and of the adapter's under LoRA."""
    converters = [LoRA.Config(rank=2)] if lora else []
    trainer = train(tmp_path, *converters, trainer_class=Recorder, **OPTIONS)
    check(trainer)
    assert all(".lora_" in name for name in trainer.history[0]) == lora


def train_and_check(folder: Path, options: dict) -> None:
    check(train(folder, trainer_class=Recorder, **OPTIONS, **options))


LAYOUTS = [
    {"training__global_batch_size": 4},
    {"parallelism__tensor_parallel_degree": 2},
    {"parallelism__pipeline_parallel_degree": 2},
    {"parallelism__data_parallel_replicate_degree": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_float64_when_sharded(tmp_path, layout):
    """FSDP, tensor parallelism, a pipeline with a tied embedding, and replicas."""
    tied = (
        {"model__tie_embeddings": True} if "parallelism__pipeline_parallel_degree" in layout else {}
    )
    run_processes(train_and_check, 2, tmp_path, layout | tied)


@pytest.mark.slow
def test_skipped_step_does_not_count(tmp_path):
    class Skipping(Recorder):
        def read_result(self, *arguments):
            outcome = super().read_result(*arguments)
            return dataclasses.replace(outcome, spike="a spike") if self.step == 2 else outcome

    trainer = train(tmp_path, trainer_class=Skipping, **OPTIONS)
    assert trainer.ema.n_updates == 5
    del trainer.history[3]
    check(trainer)


def finish(folder: Path, options: dict) -> None:
    train(folder, **OPTIONS, **SAVING, **options)


@pytest.mark.slow
def test_resumes_bit_identically_and_on_two_processes(tmp_path):
    straight = train(tmp_path / "straight", **OPTIONS, **SAVING)
    for name in ("resumed", "resharded"):
        with killed_in(Trainer, "train_step", 6):
            train(tmp_path / name, **OPTIONS, **SAVING)
    resumed = train(tmp_path / "resumed", **OPTIONS, **SAVING)
    first, second = (trainer.ema.state_dict() for trainer in (straight, resumed))
    assert first["n_updates"] == second.pop("n_updates") == 6
    assert all(torch.equal(first[name], value) for name, value in second.items())
    run_processes(finish, 2, tmp_path / "resharded", {"training__local_batch_size": 1})
    resharded = train(tmp_path / "resharded", **OPTIONS, **SAVING)  # complete: only loads
    for name, value in second.items():
        # Two ranks sum gradients in another order, for two of six steps of Adam.
        torch.testing.assert_close(resharded.ema.state_dict()[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_turned_on_later_starts_from_the_current_weights(tmp_path):
    options = {**OPTIONS, **SAVING}
    train(tmp_path, **{**options, "ema__decay": None, "training__steps": 4})
    trainer = train(tmp_path, trainer_class=Recorder, **options)
    assert trainer.ema.n_updates == 2
    check(trainer)


class Validating(Recorder):
    """Validates the averages once more at the end, as weights of the model."""

    def finish(self, reason):
        with self.ema.applied(True):
            self.of_averages = self.validator.validate()["validation_loss"]
        self.of_weights = self.validator.validate()["validation_loss"]
        super().finish(reason)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [False, True])
def test_is_validated_and_exported_by_choice(tmp_path, wanted):
    """Training continues with the same weights; the Hugging Face folder has the averages."""
    options = {
        **OPTIONS,
        **SAVING,
        "validator__enable": True,
        "validator__freq": 3,
        "validator__steps": 2,
    }
    options |= {
        "checkpoint__last_save_in_hf": True,
        "ema__for_validation": wanted,
        "ema__for_export": wanted,
    }
    trainer = train(tmp_path / "run", trainer_class=Validating, **options)
    plain = train(tmp_path / "plain", trainer_class=Recorder, **{**OPTIONS, "ema__decay": None})
    for first, second in zip(trainer.history, plain.history, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in second)
    assert abs(trainer.of_averages - trainer.of_weights) > 1e-4
    assert read_validation(tmp_path / "run")[-1][1] == (
        trainer.of_averages if wanted else trainer.of_weights
    )
    exported = load_file(tmp_path / "run/checkpoint/step-6/model.safetensors")
    weights = {**trainer.history[-1], **trainer.ema.state_dict()} if wanted else trainer.history[-1]
    embedding = exported["model.embed_tokens.weight"]
    assert torch.equal(embedding.double(), weights["tok_embeddings.weight"].double())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWOffload"])
def test_is_part_of_the_dry_run(tmp_path, optimizer):
    """An average is as large as the float32 weights, and stays on the device whatever the optimizer
    does."""
    (without,), (with_averages,) = (
        dry_run(tiny_config(tmp_path, ema__decay=decay, optimizer__name=optimizer), 1)
        for decay in (None, 0.9)
    )
    added = with_averages.peak_bytes - without.peak_bytes
    # small tensors occupy whole blocks
    assert added == pytest.approx(without.parameter_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema__decay": 1.0}, r"--ema\.decay"),
        ({"ema__for_validation": True}, "--ema.for_validation needs --ema.decay"),
        (
            {"ema__decay": 0.9, "ema__for_export": True},
            "--ema.for_export needs --checkpoint.last_save_in_hf",
        ),
    ],
)
def test_mistakes(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **options).check(world_size=1)
