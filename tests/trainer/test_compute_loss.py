"""Custom losses in `compute_loss`, the loss of the configuration, and runs with several models."""

import dataclasses
import json
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tests.processes import run_processes
from tests.training import RaggedDataLoader, read_metrics, read_validation, run, tiny_config, train
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.experiments.template.trainer import TemplateTrainer
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


class WithoutLabels(RaggedDataLoader):
    """Renames the labels, so that only `compute_loss` knows them."""

    def __next__(self):
        batch = super().__next__()
        batch["targets"] = batch.pop("labels")
        return batch


class CustomLoss(Trainer):
    """Cross entropy over targets from all logits, with loss and token count both halved."""

    measures_named = ("entropy",)

    def compute_loss(self, batch):
        logits = self.models["model"](batch["input"], batch["attention"]).flatten(0, 1).float()
        n_tokens = (batch["targets"] != -100).sum()
        probabilities = logits.softmax(-1)
        self.measure(
            "entropy",
            -(probabilities * probabilities.log()).sum(-1).sum(),
            torch.ones(()) * len(logits),
        )
        return F.cross_entropy(
            logits, batch["targets"].flatten(), reduction="sum"
        ) / 2, n_tokens / 2


def custom_loss_config(folder, loader, **options):
    config = tiny_config(
        folder, training__mixed_precision_param="float32", training__global_batch_size=8, **options
    )
    fields = {
        f.name: getattr(config.dataloader, f.name) for f in dataclasses.fields(config.dataloader)
    }
    return dataclasses.replace(config, dataloader=loader.Config(**fields))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batch_without_labels(tmp_path, batch_size):
    """A custom loss computes the loss, gradient norm and validation loss of the built-in loss for
    any local batch size. The tolerance of 1e-5 allows for the order of sums."""
    options = {"validator__enable": True, "validator__freq": 4, "validator__steps": 2}
    run(
        custom_loss_config(
            tmp_path / "ours", RaggedDataLoader, training__local_batch_size=8, **options
        )
    )
    config = custom_loss_config(
        tmp_path / "own", WithoutLabels, training__local_batch_size=batch_size, **options
    )
    run(config, CustomLoss)
    expected = read_metrics(tmp_path / "ours", "loss", "grad_norm")
    for row, reference in zip(
        read_metrics(tmp_path / "own", "loss", "grad_norm"), expected, strict=True
    ):
        assert row == pytest.approx(reference, rel=1e-5)
    ((step, loss),) = read_validation(tmp_path / "own")
    assert (step, loss) == (4, pytest.approx(read_validation(tmp_path / "ours")[0][1], rel=1e-5))
    lines = [json.loads(line) for line in (tmp_path / "own/metrics.jsonl").read_text().splitlines()]
    entropies = [line.get("entropy", line.get("validation_entropy")) for line in lines]
    assert all(0 < entropy <= math.log(2048) + 1e-6 for entropy in entropies)


def _train_custom_loss(folder, options):
    run(
        custom_loss_config(folder, WithoutLabels, training__local_batch_size=1, **options),
        CustomLoss,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("data_parallel_replicate_degree", marks=pytest.mark.slow),
        "data_parallel_shard_degree",
        pytest.param("tensor_parallel_degree", marks=pytest.mark.slow),
    ],
)
def test_custom_loss_is_summed_over_ranks_once(tmp_path, name):
    options = {"parallelism__disable_loss_parallel": True}
    _train_custom_loss(tmp_path / "one", options)
    run_processes(_train_custom_loss, 2, tmp_path / "two", {**options, f"parallelism__{name}": 2})
    numbers = ("loss", "grad_norm", "entropy")
    expected = read_metrics(tmp_path / "one", *numbers)
    for row, reference in zip(read_metrics(tmp_path / "two", *numbers), expected, strict=True):
        assert row == pytest.approx(reference, rel=1e-4)


def test_custom_loss_excludes_early_step(tmp_path):
    options = {"optimizer__early_step_in_backward": True, "training__max_norm": "inf"}
    config = tiny_config(tmp_path, **options)
    with pytest.raises(UserError, match=r"--optimizer\.early_step_in_backward.*CustomLoss"):
        run(config, CustomLoss)


class Doubled(CrossEntropyLoss):
    """Doubles the cross entropy."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        factor: float = 2.0

    def from_logits(self, logits_NV, labels_N):
        return self.config.factor * super().from_logits(logits_NV, labels_N)


def test_run_selects_its_loss(tmp_path):
    plain = tiny_config(tmp_path / "plain", training__steps=1)
    doubled = dataclasses.replace(
        plain, loss=Doubled.Config(), dump_folder=str(tmp_path / "doubled")
    )
    assert doubled.to_dict()["loss"] == {"chunk_tokens": None, "factor": 2.0}
    for config in (plain, doubled):
        run(config)
    ((_, loss),), ((_, twice),) = (
        read_metrics(tmp_path / name, "loss") for name in ("plain", "doubled")
    )
    assert twice == pytest.approx(2 * loss, rel=1e-6)


def test_command_line_sets_fields_of_the_loss(tmp_path):
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen/config_registry.py").write_text(
        "from tests.trainer.test_compute_loss import Doubled\n"
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "def debugmodel():\n"
        "    config = llama3_debugmodel()\n"
        "    config.loss = Doubled.Config()\n"
        "    return config\n"
    )
    from torchtitan.config import ConfigManager

    words = ["--module", str(tmp_path / "chosen"), "--config", "debugmodel", "--loss.factor", "3"]
    assert ConfigManager().parse_args(words).config.chosen_loss == Doubled.Config(factor=3.0)


class WithCritic(Trainer):
    """Trains a second model on the same data in the same way, and has a third, frozen one."""

    def build_models(self):
        spec = self.config.model_spec
        critic = self.build_other_model(spec, trained=True, saved=True)
        return {**super().build_models(), "critic": critic, "frozen": self.build_other_model(spec)}

    def compute_loss(self, batch):
        options = {"head": self.loss, "labels_BL": batch["labels"]}
        losses = {
            name: model(batch["input"], batch.get("attention"), **options)
            for name, model in self.models.items()
        }
        assert not losses["frozen"].requires_grad
        return losses["model"] + losses["critic"], (batch["labels"] != -100).sum()


def _weights(trainer, name):
    return {key: value.clone() for key, value in trainer.models[name].parts[0].state_dict().items()}


@pytest.mark.slow
def test_second_model_trains_and_resumes(tmp_path):
    options = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "training__mixed_precision_param": "float32",
    }
    options |= {"training__max_norm": "inf"}
    straight = train(tmp_path / "straight", trainer_class=WithCritic, **options)
    alone = train(tmp_path / "alone", **options)
    model, critic, frozen = (_weights(straight, name) for name in ("model", "critic", "frozen"))
    for name, value in _weights(alone, "model").items():
        assert torch.equal(model[name], critic[name])
        # `compute_loss` divides after the backward pass
        assert torch.allclose(model[name], value, atol=1e-6)
    assert not torch.equal(model["tok_embeddings.weight"], frozen["tok_embeddings.weight"])
    train(
        tmp_path / "resumed",
        trainer_class=WithCritic,
        training__steps=2,
        lr_scheduler__total_steps=4,
        **options,
    )
    resumed = train(
        tmp_path / "resumed", trainer_class=WithCritic, lr_scheduler__total_steps=4, **options
    )
    for name in ("model", "critic", "frozen"):
        for (key, value), expected in zip(
            _weights(resumed, name).items(), _weights(straight, name).values(), strict=True
        ):
            assert torch.equal(value, expected), f"{name} {key}"


class CustomStep(TemplateTrainer):
    """Overrides the training step, and the loss in a way that the step does not support."""

    def compute_loss(self, batch):
        loss, weight = super().compute_loss(batch)
        return 2 * loss, weight


def test_step_without_gradient_scaling_is_reported(tmp_path):
    with pytest.raises(
        UserError, match=r"CustomStep overrides train_step and compute_loss.*divide_by_weight"
    ):
        train(tmp_path, trainer_class=CustomStep)


def test_model_names_must_not_be_state_names(tmp_path):
    class Misnamed(Trainer):
        def build_models(self):
            return {
                **super().build_models(),
                "optimizer": self.build_other_model(self.config.model_spec),
            }

    with pytest.raises(UserError, match=r"a model cannot be named optimizer"):
        train(tmp_path, trainer_class=Misnamed)


def test_offloading_an_own_model_needs_fsdp(tmp_path):
    class Offloading(Trainer):
        def build_models(self):
            return {
                **super().build_models(),
                "own": self.build_other_model(self.config.model_spec, offloaded=True),
            }

    with pytest.raises(
        UserError, match=r"offloading a model is a part of FSDP, and needs --parallelism\.data_par"
    ):
        train(tmp_path, trainer_class=Offloading)
