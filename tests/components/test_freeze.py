"""Freezing by pattern: what is frozen stays as it is, costs less, and is the same in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_processes
from tests.training import read_metrics, run, tiny_config
from torchtitan.components.freeze import Freeze
from torchtitan.distributed.initialize import canonical_name
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

CHOSEN = Freeze.Config(include=["^tok_embeddings", "attention", r"^norm"], exclude=[r"layers\.1\.attention\.wq"])


class Remembering(Trainer):
    """Remembers the weights that it began with."""

    begin: dict[str, Tensor]

    def describe_run(self) -> None:
        super().describe_run()
        self.begin = weights(self)


def train(folder: Path, freeze: Freeze.Config | None = CHOSEN, *, world_size: int = 1, **options: Any) -> Remembering:
    """A tiny run; `__` in options for `.`."""
    config = tiny_config(folder, **options)
    config.model_converters = [freeze] if freeze else []
    config.check(world_size=world_size)
    trainer = run(config, Remembering)
    assert isinstance(trainer, Remembering)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """This process's part of the weights."""
    named = [parameter for part in trainer.model_parts for parameter in part.named_parameters()]
    return {canonical_name(name): getattr(p, "_local_tensor", p).detach().clone() for name, p in named}


def is_chosen(name: str) -> bool:
    """Whether `CHOSEN` freezes that parameter."""
    if name == "layers.1.attention.wq.weight":
        return False
    return name in ("tok_embeddings.weight", "norm.weight") or ".attention." in name or ".attention_norm." in name


def test_frozen_weights_stay_and_have_no_optimizer_state(tmp_path):
    trainer = train(tmp_path)
    begin = trainer.begin
    frozen = {name for name in begin if is_chosen(name)}
    assert {"tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight"} <= frozen < set(begin)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, begin[name]) == (name in frozen), name
    assert trainer.num_trained == sum(weight.numel() for name, weight in begin.items() if name not in frozen)
    with_state = {key.removeprefix("state.").rpartition(".")[0] for key in trainer.optimizer.state_dict()}
    assert with_state == set(begin) - frozen


def test_frozen_weights_count_4_operations_instead_of_6_and_2_where_the_backward_pass_ends(tmp_path):
    """All but the embedding, which is looked up and costs none. Trained from the first layer's `ffn_norm` on."""
    trainer, plain = train(tmp_path / "frozen", training__steps=1), train(tmp_path / "plain", None, training__steps=1)
    sizes = {name: weight.numel() for name, weight in weights(trainer).items() if "tok_embeddings" not in name}
    frozen = [size for name, size in sizes.items() if is_chosen(name)]
    no_gradient = [size for name, size in sizes.items() if name.startswith(("layers.0.attention", "layers.0.ffn_norm"))]
    assert plain.flops_per_token - trainer.flops_per_token == 2 * sum(frozen) + 2 * sum(no_gradient)


def test_what_is_frozen_is_logged(tmp_path, caplog):
    caplog.set_level("INFO", logger=logger.name)
    trainer = train(tmp_path, Freeze.Config(include=["w1", "^output"]), training__steps=1)
    n_frozen = trainer.num_parameters - trainer.num_trained
    message = f"freeze: {n_frozen:,} of {trainer.num_parameters:,} parameters frozen: layers.*.feed_forward.w1.weight, "
    assert message + "output.weight" in caplog.text


def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path):
    saving = {"checkpoint__enable": True, "lr_scheduler__total_steps": 4}
    straight = train(tmp_path / "straight", **saving)
    train(tmp_path / "stopped", **saving, training__steps=2)
    resumed = train(tmp_path / "stopped", **saving)
    assert read_metrics(tmp_path / "stopped", "loss", "grad_norm") == read_metrics(
        tmp_path / "straight", "loss", "grad_norm"
    )
    expected = weights(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"training__local_batch_size": 1},
    "tensor": {"parallelism__tensor_parallel_degree": 2},
    "pipeline": {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 1},
    "fsdp in bfloat16": {"training__local_batch_size": 1, "training__mixed_precision_param": "bfloat16"},
    "tensor in bfloat16": {
        "parallelism__tensor_parallel_degree": 2,
        "training__mixed_precision_param": "bfloat16",
    },
}


def train_layouts(folder: Path) -> None:
    for name, options in LAYOUTS.items():
        trainer = train(folder / name, world_size=2, **options)
        for parameter, weight in weights(trainer).items():
            assert torch.equal(weight, trainer.begin[parameter]) == is_chosen(parameter), (name, parameter)


def test_two_processes_equal_one(tmp_path):
    """To float32's rounding in another order, 1e-5. In bfloat16, the weights that are frozen are kept in it; 1e-2 is
    some of its steps of 2^-8."""
    run_processes(train_layouts, 2, tmp_path)
    train(tmp_path / "one")
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    for name in LAYOUTS:
        bound = 1e-2 if "bfloat16" in name else 1e-5
        for values, expected_values in zip(read_metrics(tmp_path / name, "loss", "grad_norm"), expected, strict=True):
            assert values == pytest.approx(expected_values, rel=bound), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "freeze.include is empty"),
        ({"include": ["("]}, r"freeze\.include '\(' is no regular expression"),
        ({"include": ["w1", "w9"]}, r"freeze\.include 'w9' matches none of the parameters; there are: tok_embeddings"),
        ({"include": ["w1"], "exclude": ["w9"]}, r"freeze\.exclude 'w9' matches none of the parameters"),
        ({"include": ["w1"], "exclude": ["feed_forward"]}, "nothing to freeze"),
        ({"include": ["."]}, "leave nothing to train"),
    ],
)
def test_what_freezes_nothing_or_everything_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(tmp_path, Freeze.Config(**options))
