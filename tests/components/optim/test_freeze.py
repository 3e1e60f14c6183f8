"""Freezing parameters by pattern: weights, optimizer state, FLOPs, resuming, and layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_processes
from tests.training import read_metrics, train
from torchtitan.components.optim.freeze import Freeze
from torchtitan.distributed.initialize import canonical_name
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

FREEZE = Freeze.Config(
    include=["^tok_embeddings", "attention", r"^head\.norm"], exclude=[r"layers\.1\.attention\.wq"]
)


class InitialWeightsTrainer(Trainer):
    """Trainer that keeps a copy of its initial weights."""

    initial: dict[str, Tensor]

    def describe_run(self) -> None:
        super().describe_run()
        self.initial = weights(self)


def train_frozen(
    folder: Path, freeze: Freeze.Config | None = FREEZE, **options: Any
) -> InitialWeightsTrainer:
    return train(folder, freeze, trainer_class=InitialWeightsTrainer, **options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the local shards of the weights."""
    named = [parameter for part in trainer.model_parts for parameter in part.named_parameters()]
    return {
        canonical_name(name): getattr(p, "_local_tensor", p).detach().clone() for name, p in named
    }


def is_frozen(name: str) -> bool:
    """Return True if `FREEZE` freezes the parameter."""
    if name == "layers.1.attention.wq.weight":
        return False
    return (
        name in ("tok_embeddings.weight", "head.norm.weight")
        or ".attention." in name
        or ".attention_norm." in name
    )


def test_frozen_weights_are_unchanged_and_have_no_optimizer_state(tmp_path):
    trainer = train_frozen(tmp_path)
    initial = trainer.initial
    frozen = {name for name in initial if is_frozen(name)}
    assert (
        {"tok_embeddings.weight", "layers.0.attention.wq.weight", "head.norm.weight"}
        <= frozen
        < set(initial)
    )
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, initial[name]) == (name in frozen), name
    assert trainer.num_trained == sum(
        weight.numel() for name, weight in initial.items() if name not in frozen
    )
    with_state = {
        key.removeprefix("state.").rpartition(".")[0] for key in trainer.optimizer.state_dict()
    }
    assert with_state == set(initial) - frozen


@pytest.mark.slow
def test_frozen_weights_reduce_the_flops(tmp_path):
    """A frozen weight counts 4 operations per token instead of 6, and 2 before the first trained
    parameter (`ffn_norm` of the first layer), since the backward pass ends there. The embedding is
    a lookup and counts none."""
    trainer = train_frozen(tmp_path / "frozen", training__steps=1)
    plain = train_frozen(tmp_path / "plain", None, training__steps=1)
    sizes = {
        name: weight.numel()
        for name, weight in weights(trainer).items()
        if "tok_embeddings" not in name
    }
    frozen = [size for name, size in sizes.items() if is_frozen(name)]
    no_gradient = [
        size
        for name, size in sizes.items()
        if name.startswith(("layers.0.attention", "layers.0.ffn_norm"))
    ]
    assert plain.flops_per_token - trainer.flops_per_token == 2 * sum(frozen) + 2 * sum(no_gradient)


def test_frozen_parameters_are_logged(tmp_path, log):
    trainer = train_frozen(
        tmp_path, Freeze.Config(include=["w1", r"^head\.output"]), training__steps=1
    )
    n_frozen = trainer.num_parameters - trainer.num_trained
    message = (
        f"freeze: {n_frozen:,} of {trainer.num_parameters:,} parameters frozen: "
        "layers.*.feed_forward.w1.weight, "
    )
    assert message + "head.output.weight" in log.text


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    saving = {"checkpoint__enable": True, "lr_scheduler__total_steps": 4}
    straight = train_frozen(tmp_path / "straight", **saving)
    train_frozen(tmp_path / "stopped", **saving, training__steps=2)
    resumed = train_frozen(tmp_path / "stopped", **saving)
    assert read_metrics(tmp_path / "stopped", "loss", "grad_norm") == read_metrics(
        tmp_path / "straight", "loss", "grad_norm"
    )
    expected = weights(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"training__local_batch_size": 1},
    "tensor": {"parallelism__tensor_parallel_degree": 2},
    "pipeline": {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 1,
    },
    "fsdp in bfloat16": {
        "training__local_batch_size": 1,
        "training__mixed_precision_param": "bfloat16",
    },
    "tensor in bfloat16": {
        "parallelism__tensor_parallel_degree": 2,
        "training__mixed_precision_param": "bfloat16",
    },
}


def train_layouts(folder: Path) -> None:
    for name, options in LAYOUTS.items():
        trainer = train_frozen(folder / name, **options)
        for parameter, weight in weights(trainer).items():
            assert torch.equal(weight, trainer.initial[parameter]) == is_frozen(parameter), (
                name,
                parameter,
            )


@pytest.mark.slow
def test_two_processes_match_one(tmp_path):
    """The tolerance of 1e-5 covers float32 sums in a different order. In bfloat16, frozen weights
    are stored in bfloat16; 1e-2 is a few of its rounding steps of 2^-8."""
    run_processes(train_layouts, 2, tmp_path)
    train_frozen(tmp_path / "one")
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    for name in LAYOUTS:
        bound = 1e-2 if "bfloat16" in name else 1e-5
        for values, expected_values in zip(
            read_metrics(tmp_path / name, "loss", "grad_norm"), expected, strict=True
        ):
            assert values == pytest.approx(expected_values, rel=bound), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "freeze.include is empty"),
        ({"include": ["("]}, r"freeze\.include '\(' is not a regular expression"),
        (
            {"include": ["w1", "w9"]},
            r"freeze\.include 'w9' matches none of the parameters: tok_embeddings",
        ),
        (
            {"include": ["w1"], "exclude": ["w9"]},
            r"freeze\.exclude 'w9' matches none of the parameters",
        ),
        (
            {"include": ["w1"], "exclude": ["feed_forward"]},
            "freeze: nothing to freeze, since exclude matches",
        ),
        ({"include": ["."]}, "leave nothing to train"),
    ],
)
def test_invalid_patterns_are_rejected(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train_frozen(tmp_path, Freeze.Config(**options))
