"""Runs that train part of a model, their FLOPs, and runs that reach the end of the data."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.processes import run_processes
from tests.training import read_validation, run, tiny_config
from torchtitan.components.data.base import Batch
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup, trained_names
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.dry_run import dry_run
from torchtitan.models.common import attention
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols import ModelConverter
from torchtitan.protocols.conversion import convert_model
from torchtitan.tools.logging import logger


def make_model(*, tie_embeddings: bool = False) -> Llama3Model:
    sizes = {
        "vocab_size": 512,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 128,
    }
    return Llama3Model.Config(rope=RoPEConfig(), tie_embeddings=tie_embeddings, **sizes).build()


# --- operations
# --------------------------------------------------------------------------------------------------

LENGTH = 32
NORMS = 7 * 64
FROZEN = {
    "nothing": [],
    "the embedding": ["^tok_embeddings"],
    "the embedding and a layer": ["^tok_embeddings", r"^layers\.0\."],
    "the embedding and two layers": ["^tok_embeddings", r"^layers\.[01]\."],
    "a layer in the middle": [r"^layers\.1\."],
    "all but the output weights": ["^tok_embeddings", r"^layers\.", r"^head\.norm"],
    "all but the last norm": ["^tok_embeddings", r"^layers\.", "output"],
}


def counted(model: Llama3Model) -> int:
    """FLOPs of forward and backward over `LENGTH` tokens by torch's counter, with attention as
    plain products."""
    from torch.utils.flop_counter import FlopCounterMode

    with (
        mock.patch.object(attention, "on_cpu", return_value=False),  # blocks call PyTorch's kernel
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.zeros(1, LENGTH, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in FROZEN), *((name, True) for name in FROZEN if "all" not in name)],
)
def test_backward_pass_ends_at_the_first_trained_parameter(name, tied):
    """Compare with torch's counter. The formula counts norms like matrix products: 7 of 64
    elements."""
    model = make_model(tie_embeddings=tied)
    convert_model(model, [Freeze.Config(include=FROZEN[name]).build()] if FROZEN[name] else [])
    assert 0 <= model.flops_per_token(LENGTH) - counted(model) / LENGTH <= 6 * NORMS


@pytest.mark.parametrize(
    "lora", [LoRA.Config(), QLoRA.Config(), LoRA.Config(include=["wo"], rslora=True)]
)
def test_flops_include_adapters(lora):
    """Equals torch's counter except for norms and the first layer: the formula counts an unneeded
    gradient of the inputs of `wk` and `wv`, 64 x 32 each, and of their adapters' first matrices,
    and attention scores from the layer of the first trained parameter."""
    model = make_model()
    convert_model(model, [lora.build()])
    excess = model.flops_per_token(LENGTH) - counted(model.to_empty(device="cpu")) / LENGTH
    first_layer = 2 * 2 * (64 * 32 + 16 * 64) + 8 * 4 * 16 * LENGTH
    assert 0 <= excess <= first_layer + 6 * NORMS


def test_model_is_built_once(tmp_path, monkeypatch):
    built: list[nn.Module] = []
    begin = Llama3Model.__init__
    monkeypatch.setattr(
        Llama3Model, "__init__", lambda self, config: (built.append(self), begin(self, config))[1]
    )
    tiny_config(tmp_path).build().close()
    assert len(built) == 1


def test_dry_run_executes_the_counted_flops(tmp_path):
    """Equal except for the norms: 5 of 64 elements, next to 200 thousand weights of matrices."""
    config = tiny_config(tmp_path)
    config.model_converters = [Freeze.Config(include=["tok_embeddings", r"^layers\.0\."])]
    (report,) = dry_run(config, world_size=1)
    assert report.executed_flops == pytest.approx(report.model_flops, rel=2e-3)


# --- parameters without a gradient, groups without parameters
# ---------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_unused_parameter_is_named(early, caplog):
    model = make_model()
    model.layers["1"].unused = nn.Parameter(torch.ones(3))
    optimizer = Optimizer.Config(early_step_in_backward=early).build(model_parts=[model])
    optimizer.zero_grad()
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    caplog.clear()
    optimizer.warn_of_idle_parameters()
    assert caplog.messages == ["trained parameters without a gradient: layers.*.unused"]


def test_group_of_frozen_parameters_warns(caplog):
    """The default group does not warn: the user did not write it."""
    model = make_model()
    convert_model(model, [LoRA.Config().build()])
    caplog.clear()
    settings = Optimizer.Config(
        param_groups={"head": ParamGroup(pattern="output"), **Optimizer.Config().param_groups}
    )
    for names in (None, trained_names(model)):
        settings.build(model_parts=[model], all_names=names)
    message = (
        "--optimizer.param_groups.head is empty: no remaining trained parameter matches 'output'"
    )
    assert caplog.messages == [message] * 2


# --- end of data
# --------------------------------------------------------------------------------------------------


class Short(PretrainDataLoader):
    """A stream with batches on rank 0 only; batches of other ranks have no labels."""

    n_batches: ClassVar[int] = 2
    n_read = 0
    is_over = False

    @dataclass(kw_only=True, slots=True)
    class Config(PretrainDataLoader.Config):
        """Same options as `PretrainDataLoader`."""

    @property
    def exhausted(self) -> bool:
        return self.is_over

    def __next__(self) -> Batch:
        batch = super().__next__()
        self.n_read += 1
        self.is_over = self.n_read > self.n_batches or (
            dist.is_initialized() and dist.get_rank() > 0
        )
        if self.is_over:
            batch["labels"].fill_(-100)
        return batch


class Simulation(ModelConverter):
    """Changes the model from a step on."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Start of the change."""

        start_step: int = 2
        """Number of steps without the change."""

    config: Config

    def pre_step_hook(self, model_parts: list[nn.Module], step: int) -> None:
        for part in model_parts:
            part.head.norm.eps = 1e4 if step > self.config.start_step else 1e-5


def train_on_ragged_data(folder: Path) -> None:
    """One of two processes has no data from the start: its gradients are 0, but exist."""
    for early in (False, True):
        config = tiny_config(
            folder / str(early),
            training__max_norm="inf",
            optimizer__early_step_in_backward=early,
            training__steps=9,
        )
        config.dataloader = Short.Config()
        config.check(world_size=2)
        messages: list[str] = []
        logger.addFilter(
            lambda record, messages=messages: messages.append(record.getMessage()) or True
        )
        trainer = run(config)
        assert trainer.step == Short.n_batches
        assert not any("without a gradient" in message for message in messages)
    (folder / f"rank {dist.get_rank()} has ended").touch()


@pytest.mark.slow
def test_data_ends_on_one_rank_in_the_first_step(tmp_path):
    run_processes(train_on_ragged_data, 2, tmp_path)
    assert len(list(tmp_path.glob("rank *"))) == 2


@pytest.mark.parametrize("start_step", [1, 2])
def test_last_validation_uses_the_model_of_the_last_step(tmp_path, start_step):
    """The data ends after two steps; changes for a third step have not begun."""
    validated = {}
    for name, converters in {
        "plain": [],
        "simulated": [Simulation.Config(start_step=start_step)],
    }.items():
        config = tiny_config(
            tmp_path / name,
            validator__enable=True,
            validator__freq=100,
            validator__steps=1,
            optimizer__lr=0.0,
        )
        config.model_converters, config.dataloader = converters, Short.Config()
        config.check(world_size=1)
        run(config)
        validated[name] = read_validation(tmp_path / name)
    assert [step for step, _ in validated["plain"]] == [2]
    assert (validated["plain"] == validated["simulated"]) == (start_step == 2)
