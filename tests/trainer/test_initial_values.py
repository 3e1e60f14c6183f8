"""Which initial values a run draws: those that it does not read from files."""

import shutil

import pytest
import torch

from tests.training import tiny_config, train
from torchtitan.components.peft import LoRA
from torchtitan.distributed import initialize, initialize_weights
from torchtitan.trainer import Trainer

ADAPTER = LoRA.Config(rank=4, include=["wq"])
ADAPTER_NAMES = {
    f"layers.{layer}.attention.wq.{name}" for layer in (0, 1) for name in ("lora_A", "lora_B")
}


@pytest.fixture
def drawn(monkeypatch):
    """Names of the parameters whose values are drawn."""
    names: set[str] = set()

    def spy(key, *args):
        names.add(key.partition("/")[2])
        return original(key, *args)

    original = initialize.uniform_numbers
    monkeypatch.setattr(initialize, "uniform_numbers", spy)
    return names


def initial_weights(model):
    """All values that the seed determines."""
    expected = {name: torch.empty_like(parameter) for name, parameter in model.named_parameters()}
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    initialize_weights(model, 42)
    for name, parameter in model.named_parameters():
        expected[name].copy_(parameter.detach())
        parameter.detach().copy_(kept[name])
    return expected


def load(config, trainer_class=Trainer):
    """Return the model of a run after `load_checkpoint`."""
    trainer = trainer_class(config)
    try:
        trainer.load_checkpoint()
    finally:
        trainer.close()
    (model,) = trainer.model_parts
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps with a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = train(folder, training__steps=2, checkpoint__enable=True)
    (model,) = trainer.model_parts
    return folder, {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }


def assert_equal(model, expected):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_building_a_new_run_draws_everything(tmp_path, drawn):
    trainer = tiny_config(tmp_path, debug__seed=42).build()
    trainer.close()
    (model,) = trainer.model_parts
    assert drawn == {name for name, _ in model.named_parameters()}
    assert_equal(model, initial_weights(model))


def test_initial_values_of_a_subclass_stay(tmp_path, drawn):
    class Constant(Trainer):
        def init_weights(self):
            for parameter in self.model_parts[0].to_empty(device="cpu").parameters():
                torch.nn.init.constant_(parameter, 0.5)

    model = load(tiny_config(tmp_path), Constant)
    assert not drawn
    assert all((parameter == 0.5).all() for parameter in model.parameters())


def test_a_resumed_run_draws_nothing(saved, tmp_path, drawn):
    folder, weights = saved
    shutil.copytree(folder, tmp_path / "run")
    model = load(tiny_config(tmp_path / "run", training__steps=3, checkpoint__enable=True))
    assert not drawn
    assert_equal(model, weights)


def test_a_run_that_starts_from_other_weights_draws_nothing(saved, tmp_path, drawn):
    folder, weights = saved
    model = load(
        tiny_config(tmp_path, checkpoint__initial_load_path=folder / "checkpoint" / "step-2")
    )
    assert not drawn
    assert_equal(model, weights)


def test_adapters_are_drawn_beside_loaded_weights(saved, tmp_path, drawn):
    folder, weights = saved
    config = tiny_config(
        tmp_path, checkpoint__initial_load_path=folder / "checkpoint" / "step-2", debug__seed=42
    )
    config.model_converters.append(ADAPTER)
    model = load(config)
    assert drawn == ADAPTER_NAMES
    expected = initial_weights(model)
    assert expected["layers.0.attention.wq.lora_A"].abs().max() > 0
    assert_equal(model, {**expected, **weights})


def test_weights_are_drawn_if_the_expected_checkpoint_is_not_loaded(saved, tmp_path, drawn):
    """It is excluded, or has disappeared since the run was built."""
    folder, _ = saved
    options = {"training__steps": 3, "checkpoint__enable": True, "debug__seed": 42}
    shutil.copytree(folder, tmp_path / "excluded")
    model = load(
        tiny_config(tmp_path / "excluded", checkpoint__exclude_from_loading=["model"], **options)
    )
    assert drawn == {name for name, _ in model.named_parameters()}
    assert_equal(model, initial_weights(model))
    drawn.clear()

    shutil.copytree(folder, tmp_path / "removed")
    trainer = tiny_config(tmp_path / "removed", **options).build()
    assert not drawn
    shutil.rmtree(tmp_path / "removed" / "checkpoint" / "step-2")
    trainer.load_checkpoint()
    trainer.close()
    (model,) = trainer.model_parts
    assert_equal(model, initial_weights(model))


def test_buffers_that_checkpoints_omit_are_drawn(saved, tmp_path, monkeypatch):
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.protocols.initializer import Constant, initializers_of, with_initializers

    class Buffered(Llama3Model):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("table", torch.empty(3), persistent=False)
            with_initializers(self, **initializers_of(self), table=Constant(2.0))

    folder, weights = saved
    shutil.copytree(folder, tmp_path / "run")
    config = tiny_config(tmp_path / "run", training__steps=3, checkpoint__enable=True)
    monkeypatch.setattr(type(config.model_spec.model), "build", lambda self: Buffered(self))
    model = load(config)
    assert torch.equal(model.table, torch.full((3,), 2.0))
    assert_equal(model, weights)
