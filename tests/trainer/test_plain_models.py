"""Models of a run that are plain `nn.Module`s."""

import pytest
import torch
from torch import nn

from tests.training import train
from torchtitan.components.generation import Engine, Sampling
from torchtitan.components.peft import LoRA
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

OPTIONS = {
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "training__mixed_precision_param": "float32",
}
OPTIONS |= {"training__max_norm": "inf", "optimizer__weight_decay": 0.0, "optimizer__name": "SGD"}


class Bigrams(Trainer):
    """Has a plain main model, and a frozen plain one, which shifts its logits."""

    def build_models(self):
        size = self.config.model_spec.model.vocab_size
        shift = nn.Linear(1, size).requires_grad_(False)
        return {"model": nn.Embedding(size, size), "shift": shift}

    def compute_loss(self, batch):
        logits = self.models["model"](batch["input"]) + self.models["shift"](torch.ones(1))
        labels = batch["labels"]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return losses, (labels != -100).sum()


class Recorded(Bigrams):
    """Keeps the weights at its start, and the data of its steps."""

    def __init__(self, config):
        super().__init__(config)
        states = {name: model.parts[0].state_dict() for name, model in self.models.items()}
        self.initial = {
            name: {key: value.clone() for key, value in state.items()}
            for name, state in states.items()
        }
        self.batches = []

    def next_micro_batches(self, batches):
        found = super().next_micro_batches(batches)
        self.batches += found
        return found


def test_plain_models_train_as_in_pytorch(tmp_path):
    """SGD in a loop over the same batches; float32 rounds sums to about 1e-6."""
    trainer = train(tmp_path, trainer_class=Recorded, lr_scheduler__warmup_steps=0, **OPTIONS)
    weight = nn.Parameter(trainer.initial["model"]["weight"].double())
    shift = (
        trainer.initial["shift"]["weight"][:, 0].double()
        + trainer.initial["shift"]["bias"].double()
    )
    for batch, lr in zip(
        trainer.batches, [3e-4 * factor for factor in learning_rates(trainer)], strict=True
    ):
        logits = (weight[batch["input"]] + shift).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = nn.Parameter(weight.detach() - lr * gradient)
    found = trainer.models["model"].parts[0].weight.double()
    assert torch.allclose(found, weight, atol=1e-6) and len(trainer.batches) == 4
    assert not torch.equal(found, trainer.initial["model"]["weight"].double())
    frozen = trainer.models["shift"].parts[0].state_dict()
    assert all(torch.equal(value, trainer.initial["shift"][key]) for key, value in frozen.items())


def learning_rates(trainer: Trainer) -> list[float]:
    """Return the factors of the steps' learning rates, from the schedule of another optimizer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = trainer.config.lr_scheduler.build(
        optimizer=optimizer, training_steps=trainer.total_steps
    )
    factors = []
    for _ in range(trainer.total_steps):
        factors.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return factors


def test_plain_models_resume_exactly(tmp_path):
    options = {**OPTIONS, "lr_scheduler__total_steps": 4}
    straight = train(tmp_path / "straight", trainer_class=Bigrams, **options)
    train(tmp_path / "resumed", trainer_class=Bigrams, training__steps=2, **options)
    resumed = train(
        tmp_path / "resumed",
        trainer_class=Bigrams,
        debug__seed=straight.config.debug.seed,
        **options,
    )
    for name, model in straight.models.items():
        found = resumed.models[name].parts[0].state_dict()
        assert all(
            torch.equal(value, found[key]) for key, value in model.parts[0].state_dict().items()
        )


def test_another_plain_model_does_not_resume(tmp_path):
    class Other(Bigrams):
        def build_models(self):
            return {**super().build_models(), "shift": nn.Linear(2, 3).requires_grad_(False)}

    train(tmp_path, trainer_class=Bigrams, training__steps=2, **OPTIONS)
    with pytest.raises(UserError, match="architecture of shift was Linear"):
        train(tmp_path, trainer_class=Other, **OPTIONS)


def of_models(build):
    """Return a trainer with these models, and the loss of `Bigrams`."""

    class Built(Bigrams):
        def build_models(self):
            return build(super().build_models())

    return Built


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda models: models["model"],
            r"build_models returned Embedding; it must return a dictionary of models",
        ),
        (lambda models: {"critic": models["model"]}, "one of them 'model'"),
        (
            lambda models: {**models, "judge": "path"},
            "returned str as model 'judge'; it must be a RunModel",
        ),
        (
            lambda models: {"model": nn.Linear(2, 2, device="meta")},
            r"'model' is a plain .* \(Linear\) on the meta device",
        ),
    ],
)
def test_other_results_are_named(tmp_path, build, message):
    with pytest.raises(UserError, match=message):
        train(tmp_path, trainer_class=of_models(build))


@pytest.mark.parametrize(
    "options",
    [{"checkpoint__last_save_in_hf": True, "checkpoint__enable": True}, {"compile__enable": True}],
)
def test_what_a_plain_main_model_lacks_is_refused(tmp_path, options):
    option = next(iter(options)).replace("__", ".")
    with pytest.raises(
        UserError, match=rf"'model' is a plain nn\.Module, which does not support --{option}"
    ):
        train(tmp_path, trainer_class=Bigrams, **options)


def test_converters_and_the_own_loss_of_a_plain_main_model(tmp_path):
    class WithoutLoss(Trainer):
        build_models = Bigrams.build_models

    with pytest.raises(UserError, match="does not support --model_converters"):
        train(tmp_path, LoRA.Config(), trainer_class=Bigrams)
    with pytest.raises(UserError, match="override compute_loss"):
        train(tmp_path, trainer_class=WithoutLoss)


def test_a_plain_module_next_to_the_main_model(tmp_path):
    class WithJudge(Trainer):
        def build_models(self):
            return {**super().build_models(), "judge": nn.Linear(4, 1)}

        def compute_loss(self, batch):
            loss, weight = super().compute_loss(batch)
            return loss + self.models["judge"](torch.ones(2, 4)).square().sum() * weight, weight

    trainer = train(tmp_path, trainer_class=WithJudge, training__mixed_precision_param="float32")
    assert trainer.step == 4 and "judge" in trainer.states()


def test_a_plain_module_cannot_generate():
    with pytest.raises(UserError, match=r"a Linear cannot generate text: it is a plain nn\.Module"):
        Engine(nn.Linear(2, 2), sampling=Sampling())
