"""Runs that start from and export Hugging Face weights, and resume from their own checkpoints."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.pretrained import FLOAT32, LAST_IN_HF, from_folder, make_pretrained, read_weights
from tests.training import launch, read_metrics, tiny_config, train
from torchtitan.components.checkpoint import ModelState, list_checkpoints
from torchtitan.components.weights.pretrained import load_pretrained
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

TIED = {**FLOAT32, "model__tie_embeddings": True}


def test_starts_from_hugging_face_and_exports_to_it(tmp_path):
    """A run with learning rate 0 exports exactly the weights that it started from."""
    source = make_pretrained(tmp_path / "source")
    train(
        tmp_path / "run",
        **FLOAT32,
        **from_folder(source),
        **LAST_IN_HF,
        optimizer__lr=0,
        optimizer__weight_decay=0,
    )
    before, after = read_weights(source), read_weights(tmp_path / "run" / "checkpoint" / "step-4")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype


def test_the_export_is_the_trained_model(tmp_path):
    trainer = train(tmp_path, **TIED, **LAST_IN_HF, checkpoint__export_dtype="bfloat16")
    folder = tmp_path / "checkpoint" / "step-4"
    (model,) = trainer.model_parts
    exported = read_weights(folder)
    expected = model.tok_embeddings.weight.to(torch.bfloat16)
    assert torch.equal(exported["model.embed_tokens.weight"], expected)
    assert torch.equal(exported["lm_head.weight"], expected)  # tied by transformers
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    from transformers import AutoTokenizer

    assert (
        AutoTokenizer.from_pretrained(folder)
        .decode(trainer.tokenizer.encode("Once upon a time"))
        .endswith("time")
    )


def test_values_that_overflow_are_exported_in_float32(tmp_path, caplog):
    """A weight of 1e5 is infinite in float16."""

    class Large(Trainer):
        def init_weights(self):
            super().init_weights()
            with torch.no_grad():
                self.model_parts[0].tok_embeddings.weight[0, 0] = 1e5

    train(
        tmp_path,
        trainer_class=Large,
        **FLOAT32,
        **LAST_IN_HF,
        checkpoint__export_dtype="float16",
        optimizer__lr=0,
    )
    weights = read_weights(tmp_path / "checkpoint" / "step-4")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["model.embed_tokens.weight"][0, 0] == 1e5
    assert "values of tok_embeddings.weight overflow in float16" in caplog.text


@pytest.mark.slow
def test_a_run_continues_after_a_hugging_face_export(tmp_path, caplog):
    """It cannot resume from the export, so it repeats the steps after the last full checkpoint,
    exactly."""
    options = {**FLOAT32, **LAST_IN_HF, "lr_scheduler__total_steps": 8}
    train(tmp_path / "run", **options)
    assert [info.kind for info in list_checkpoints(tmp_path / "run" / "checkpoint")] == [
        "full",
        "huggingface",
    ]
    train(tmp_path / "run", **{**options, "training__steps": 8})
    train(tmp_path / "straight", **{**options, "training__steps": 8})
    losses = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert [step for step, *_ in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses == read_metrics(tmp_path / "straight", "loss", "grad_norm")
    assert "step-4: it holds" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, {}),
        (4, {"parallelism__tensor_parallel_degree": 2}),
        (4, {"parallelism__pipeline_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}),
    ],
    ids=["fsdp", "fsdp-tp", "pp-tp"],
)
def test_layouts(tmp_path, processes, layout):
    """Weights are loaded into shards, trained as in one process, and exported from shards."""
    options = {
        **FLOAT32,
        **from_folder(make_pretrained(tmp_path / "source")),
        "training__global_batch_size": 8,
    }
    launch(tmp_path / "many", processes, **options, **layout, **LAST_IN_HF)
    train(tmp_path / "one", **options, **LAST_IN_HF)
    many, one = (read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("many", "one"))
    # Float32 sums in another order.
    assert many == [pytest.approx(line, rel=1e-5) for line in one]
    weights, expected = (
        read_weights(tmp_path / name / "checkpoint" / "step-4") for name in ("many", "one")
    )
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_weights_of_another_model_are_rejected_before_the_run(tmp_path):
    source = make_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match=r"missing from the checkpoint: model\.layers\.2\."):
        tiny_config(tmp_path / "run", **from_folder(source), model__n_layers=3).check(world_size=1)
    with pytest.raises(
        UserError, match=r"mlp\.gate_proj\.weight has shape \[128, 64\] instead of \[96, 64\]"
    ):
        tiny_config(tmp_path / "run", **from_folder(source), model__ffn_dim=96).check(world_size=1)
    with pytest.raises(UserError, match="holds no checkpoint"):
        (tmp_path / "empty").mkdir()
        tiny_config(tmp_path / "run", **from_folder(tmp_path / "empty")).check(world_size=1)


def test_a_model_in_bfloat16_is_trained_in_float32(tmp_path):
    source = make_pretrained(tmp_path / "source", torch.bfloat16)
    trainer = train(tmp_path / "run", **FLOAT32, **from_folder(source), training__steps=1)
    assert {parameter.dtype for parameter in trainer.model_parts[0].parameters()} == {torch.float32}


def test_a_native_checkpoint_can_be_opened(tmp_path):
    """A checkpoint folder describes its own model."""
    trainer = train(tmp_path, **FLOAT32, checkpoint__enable=True)
    loaded = load_model(tmp_path / "checkpoint" / "step-4", device="cpu")
    assert loaded.spec.model == trainer.config.model_spec.model
    for (name, expected), weight in zip(
        trainer.model_parts[0].named_parameters(), loaded.model.parameters(), strict=True
    ):
        assert torch.equal(weight, expected), name


def test_the_best_and_the_newest_are_kept(tmp_path):
    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5}

    class Scripted(Trainer):
        def validate(self):
            super().validate()
            return losses[self.step]

    options = {
        "validator__enable": True,
        "validator__freq": 2,
        "validator__steps": 1,
        "training__steps": 8,
    }
    keep = {"checkpoint__enable": True, "checkpoint__keep_best": True, "checkpoint__interval": 100}
    train(
        tmp_path, trainer_class=Scripted, **FLOAT32, **options, **keep, checkpoint__keep_latest_k=1
    )
    kept = {info.step: info.validation_loss for info in list_checkpoints(tmp_path / "checkpoint")}
    assert kept == {4: 3.0, 8: 3.5}


def test_keep_best_needs_validation(tmp_path):
    with pytest.raises(UserError, match="--validator.enable"):
        tiny_config(tmp_path, checkpoint__enable=True, checkpoint__keep_best=True).check(
            world_size=1
        )


@pytest.mark.slow
def test_resuming_with_another_batch_size(tmp_path):
    """The data continues after the last sample that was trained on."""
    options = {**FLOAT32, "checkpoint__enable": True, "lr_scheduler__total_steps": 8}
    seen: list[torch.Tensor] = []

    class Recording(Trainer):
        def post_dataloading_process(self, batch):
            seen.extend(batch["input"])
            return super().post_dataloading_process(batch)

    train(
        tmp_path / "changed",
        trainer_class=Recording,
        **options,
        training__steps=2,
        training__local_batch_size=2,
    )
    train(
        tmp_path / "changed",
        trainer_class=Recording,
        **options,
        training__steps=4,
        training__local_batch_size=4,
    )
    changed, seen[:] = list(seen), []
    train(
        tmp_path / "plain",
        trainer_class=Recording,
        **options,
        training__steps=6,
        training__local_batch_size=2,
    )
    assert torch.equal(torch.stack(changed), torch.stack(seen))


class Distilling(Trainer):
    """Trains a model and keeps a teacher."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        teacher: str = ""
        """Checkpoint that the teacher starts from."""

    config: Config

    def states(self):
        with torch.device("meta"):
            self.teacher = self.config.model_spec.model.build()
        self.teacher.to_empty(device=self.device)
        return {**super().states(), "teacher": ModelState([self.teacher])}

    def initial_loads(self):
        load = lambda: load_pretrained(self.config.teacher, self.config.model_spec, [self.teacher])  # noqa: E731
        return {**super().initial_loads(), "teacher": load}

    def complete_step(self, outcome):
        with torch.no_grad():
            nn.utils.vector_to_parameters(
                0.9 * nn.utils.parameters_to_vector(self.teacher.parameters()),
                self.teacher.parameters(),
            )
        super().complete_step(outcome)


@pytest.mark.slow
def test_several_models_in_one_run(tmp_path):
    """The models start from different checkpoints in different formats, and are saved together."""
    source = make_pretrained(tmp_path / "source")
    train(tmp_path / "other", **FLOAT32, checkpoint__enable=True, training__steps=1)

    def run(folder: Path, **options) -> Distilling:
        config = tiny_config(folder, **FLOAT32, checkpoint__enable=True, **options)
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        trainer = Distilling.Config(
            **values, teacher=str(tmp_path / "other" / "checkpoint" / "step-1")
        ).build()
        trainer.train()
        trainer.close()
        return trainer

    straight = run(tmp_path / "straight", **from_folder(source))
    run(tmp_path / "resumed", **from_folder(source), training__steps=2, lr_scheduler__total_steps=4)
    resumed = run(tmp_path / "resumed", **from_folder(source))
    assert not torch.equal(
        straight.teacher.head.norm.weight, straight.model_parts[0].head.norm.weight
    )
    for model, expected in (
        (resumed.teacher, straight.teacher),
        (resumed.model_parts[0], straight.model_parts[0]),
    ):
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
