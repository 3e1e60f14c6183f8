"""The training loop: the definition of the loss, equal results in all layouts, exact resume, and
errors."""

import gc
import itertools
import json
import math
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F

from tests.training import (
    RaggedDataLoader,
    launch,
    read_metrics,
    read_validation,
    run,
    tiny_config,
    train,
)
from torchtitan.components.data import HubDataset, register_dataset
from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.tokenizer.pretrained import EMBEDDED_TOKENIZER
from torchtitan.tools.errors import UserError
from torchtitan.trainer import NonFiniteError, Trainer

EXACT = ("loss", "grad_norm", "lr", "n_tokens_seen")


def ragged_config(folder: Path, **options):
    config = tiny_config(folder, **options)
    config.dataloader = RaggedDataLoader.Config()
    return config


class TestLoss:
    def reference(self, config, steps: int, batch_size: int) -> list[tuple[int, float, float]]:
        """The run in plain torch and float64: mean over all valid tokens of the global batch,
        SGD."""
        trainer = Trainer(config)
        model = trainer.model_parts[0].double()
        loader = config.dataloader.build(
            tokenizer=trainer.tokenizer, seq_len=32, local_batch_size=batch_size, seed=0
        )
        lines = []
        for step, batch in enumerate(itertools.islice(loader, steps), start=1):
            logits = model(batch["input"], batch["attention"])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
            lr = trainer.lr_scheduler.lr
            trainer.lr_scheduler.step()
            scale = min(1.0, config.training.max_norm / norm.item()) * lr
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= scale * gradient
            lines.append((step, loss.item(), norm.item()))
        trainer.close()
        return lines

    @pytest.mark.slow
    @pytest.mark.parametrize(("local_batch_size", "max_norm"), [(8, 0.1), (2, 0.1), (1, 100.0)])
    def test_equals_plain_torch_over_the_whole_batch(self, tmp_path, local_batch_size, max_norm):
        """1 x 8, 4 x 2 and 8 x 1 windows with ragged masks and clipping equal one batch in
        float64."""
        options = {
            "training__global_batch_size": 8,
            "training__max_norm": max_norm,
            "optimizer__lr": 0.5,
        }
        options |= {"optimizer__name": "SGD", "optimizer__weight_decay": 0.0, "training__steps": 6}
        run(ragged_config(tmp_path, training__local_batch_size=local_batch_size, **options))
        expected = self.reference(
            ragged_config(tmp_path / "reference", **options), steps=6, batch_size=8
        )
        # Float32 against float64 over six steps.
        assert read_metrics(tmp_path, "loss", "grad_norm") == [
            pytest.approx(line, rel=1e-5) for line in expected
        ]

    def test_mean_of_means_is_caught(self, tmp_path):
        """The comparison fails for a trainer that averages the means of micro-batches."""

        class MeanOfMeans(Trainer):
            def forward_backward_step(self, batch, n_tokens):
                valid = (batch["labels"] != -100).sum()
                return super().forward_backward_step(
                    batch, valid * self.gradient_accumulation_steps
                )

        options = {"training__global_batch_size": 8, "training__steps": 3}
        run(ragged_config(tmp_path / "right", **options))
        run(ragged_config(tmp_path / "wrong", **options), MeanOfMeans)
        right, wrong = (read_metrics(tmp_path / name, "loss") for name in ("right", "wrong"))
        assert abs(right[0][1] / wrong[0][1] - 1) > 1e-4

    def test_batch_without_valid_tokens_changes_nothing(self, tmp_path):
        class AllIgnored(PretrainDataLoader):
            def __next__(self):
                batch = super().__next__()
                batch["labels"].fill_(-100)
                return batch

        config = tiny_config(tmp_path, optimizer__weight_decay=0.0)
        config.dataloader = AllIgnored.Config()
        run(config)
        assert read_metrics(tmp_path, "loss", "grad_norm") == [
            (step, 0.0, 0.0) for step in range(1, 5)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_bfloat16_computes_close_to_float32(tmp_path, processes):
    launch(
        tmp_path,
        processes,
        training__mixed_precision_param="bfloat16",
        training__global_batch_size=8,
    )
    train(
        tmp_path / "fp32", training__mixed_precision_param="float32", training__global_batch_size=8
    )
    low, full = (read_metrics(folder, "loss") for folder in (tmp_path, tmp_path / "fp32"))
    # bfloat16 has 8 bits, and the loss averages many roundings; equal values would mean that it was
    # not used.
    assert low == [pytest.approx(line, rel=2e-3) for line in full]
    assert low != full


RESUMABLE = {
    "checkpoint__enable": True,
    "checkpoint__interval": 5,
    "checkpoint__keep_latest_k": 0,
    "training__steps": 10,
    "training__local_batch_size": 2,
    "training__global_batch_size": 4,
    "validator__enable": True,
    "validator__freq": 4,
    "validator__steps": 1,
}


class Killed(Exception):
    """Simulates a kill between two steps."""


class KilledAfterStepSeven(Trainer):
    def complete_step(self, outcome):
        super().complete_step(outcome)
        if self.step == 7:
            raise Killed

    def save_last_step(self, error):
        """A kill saves nothing."""


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("async_mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_resume_is_exact(tmp_path, num_workers, async_mode):
    """Ten uninterrupted steps equal a run that is killed after seven and resumes from step five."""
    options = {
        **RESUMABLE,
        "dataloader__num_workers": num_workers,
        "checkpoint__async_mode": async_mode,
    }
    straight = train(tmp_path / "straight", **options)
    with pytest.raises(Killed):
        train(tmp_path / "resumed", trainer_class=KilledAfterStepSeven, **options)
    assert len(read_metrics(tmp_path / "resumed")) == 7
    resumed = train(tmp_path / "resumed", **options)
    assert read_metrics(tmp_path / "resumed", *EXACT) == read_metrics(tmp_path / "straight", *EXACT)
    assert read_validation(tmp_path / "resumed") == read_validation(tmp_path / "straight")
    assert [step for step, _ in read_validation(tmp_path / "straight")] == [4, 8, 10]
    weights = [dict(trainer.model_parts[0].named_parameters()) for trainer in (straight, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def copy_checkpoint(source: Path, target: Path, step: int) -> None:
    shutil.copytree(source / "checkpoint" / f"step-{step}", target / "checkpoint" / f"step-{step}")


@pytest.mark.slow
def test_resume_with_two_processes_is_exact(tmp_path):
    options = {**RESUMABLE, "training__local_batch_size": 1}
    launch(tmp_path / "straight", 2, **options)
    copy_checkpoint(tmp_path / "straight", tmp_path / "resumed", step=5)
    launch(tmp_path / "resumed", 2, **options)
    assert (
        read_metrics(tmp_path / "resumed", *EXACT)
        == read_metrics(tmp_path / "straight", *EXACT)[5:]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resume_with_another_number_of_processes(tmp_path, before, after):
    """The data continues at its position, and the metrics are equal up to rounding."""
    options = {
        **RESUMABLE,
        "training__local_batch_size": 2,
        "training__mixed_precision_param": "float32",
    }
    launch(tmp_path / "before", before, **options)
    copy_checkpoint(tmp_path / "before", tmp_path / "after", step=5)
    launch(tmp_path / "after", after, **options)
    expected = read_metrics(tmp_path / "before", *EXACT)[5:]
    # The tolerance of layouts without a resume.
    assert read_metrics(tmp_path / "after", *EXACT) == [
        pytest.approx(line, rel=1e-5) for line in expected
    ]


def test_changed_hyper_parameters_apply_on_resume(tmp_path):
    options = {
        **RESUMABLE,
        "training__steps": 5,
        "lr_scheduler__total_steps": 20,
        "lr_scheduler__decay_ratio": 0.1,
    }
    train(tmp_path, **options, optimizer__lr=1e-3)
    resumed = train(
        tmp_path,
        **{**options, "training__steps": 6},
        optimizer__lr=5e-4,
        optimizer__weight_decay=0.2,
    )
    assert [lr for _, lr in read_metrics(tmp_path, "lr")][-2:] == [1e-3, 5e-4]
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.2}


class InfiniteLoss(CrossEntropyLoss):
    """Infinite in one forward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        at_call: int = 3

    calls = 0

    def __call__(self, hidden_BLD, weight_VD, labels_BL):
        self.calls += 1
        loss = super().__call__(hidden_BLD, weight_VD, labels_BL)
        return loss * math.inf if self.calls == self.config.at_call else loss


class Recorder(Trainer):
    """Records weights and moments after each step."""

    def complete_step(self, outcome):
        super().complete_step(outcome)
        state = {**dict(self.model_parts[0].named_parameters()), **self.optimizer.state_dict()}
        history = self.__dict__.setdefault("history", [])
        history.append({name: value.detach().clone() for name, value in state.items()})


class TestNonFinite:
    def test_stops_with_step_and_documents(self, tmp_path):
        text = tmp_path / "poem.txt"
        text.write_text("roses are red, violets are blue, " * 40)
        config = tiny_config(tmp_path, dataloader__dataset=text)
        config.model_spec.loss = InfiniteLoss.Config()
        with pytest.raises(NonFiniteError, match=r"step 3.*loss inf.*poem\.txt"):
            run(config)
        assert len(read_metrics(tmp_path)) == 2

    def test_is_reported_with_any_document_names(self, tmp_path):
        class Plain(PretrainDataLoader):
            def __next__(self):
                return {
                    name: value for name, value in super().__next__().items() if name != "documents"
                }

        config = tiny_config(tmp_path)
        config.dataloader = Plain.Config()
        config.model_spec.loss = InfiniteLoss.Config()
        with pytest.raises(NonFiniteError, match="documents: unknown"):
            run(config)

    def test_skips_without_touching_weights_or_moments(self, tmp_path):
        config = tiny_config(tmp_path, training__on_nonfinite="skip")
        config.model_spec.loss = InfiniteLoss.Config()
        history = run(config, Recorder).history
        assert len(history) == 4
        assert all(torch.equal(history[1][name], history[2][name]) for name in history[1])
        assert any(not torch.equal(history[2][name], history[3][name]) for name in history[2])
        assert all(value.isfinite().all() for value in history[3].values())
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert lines[2]["loss"] is None
        assert lines[3]["loss"] == pytest.approx(7.6, abs=0.3)


class TestEndOfData:
    @pytest.fixture
    def small_text(self, tmp_path) -> Path:
        path = tmp_path / "small.txt"
        path.write_text(" ".join(f"word{i}" for i in range(200)))
        return path

    def test_epochs_set_steps_and_schedule(self, tmp_path, small_text, log):
        trainer = train(
            tmp_path,
            dataloader__dataset=small_text,
            training__epochs=3,
            training__steps=1,
            lr_scheduler__warmup_steps=0,
        )
        steps = math.ceil(trainer.dataloader.n_samples / 2)
        assert trainer.step == trainer.lr_scheduler.total_steps == steps > 1
        assert len(read_metrics(tmp_path)) == steps
        said = (
            f"--training.epochs 3 sets the length of the run, {steps} steps, in place of "
            "--training.steps 1; "
        )
        assert [record.levelname for record in log.records if said in record.getMessage()] == [
            "WARNING"
        ]

    @pytest.mark.slow
    def test_infinite_data_repeats(self, tmp_path, small_text):
        trainer = train(tmp_path, dataloader__dataset=small_text, training__steps=40)
        assert trainer.step == 40
        assert trainer.dataloader.n_samples is None
        assert (
            train(tmp_path / "once", dataloader__dataset=small_text, training__epochs=1).step < 40
        )

    def test_loader_without_a_length(self, tmp_path, caplog):
        """A custom loader only has to raise StopIteration."""

        class Three(BaseDataLoader):
            def __init__(self, config, *, seq_len, local_batch_size, **_):
                super().__init__(config)
                tokens = torch.arange(local_batch_size * seq_len).view(local_batch_size, seq_len)
                self.batches = iter([{"input": tokens, "labels": tokens}] * 3)

            def __next__(self):
                return next(self.batches)

            def state_dict(self):
                return {}

        config = tiny_config(tmp_path, training__steps=8)
        config.dataloader = Three.Config()
        with caplog.at_level("INFO", logger="torchtitan"):
            assert run(config).step == 3
        assert "the data ended after step 3" in caplog.text
        assert len(read_metrics(tmp_path)) == 3

    @pytest.fixture
    def finite_stream(self, tmp_path) -> str:
        """A registered dataset of 40 documents, streamed from a local file."""
        rows = [
            json.dumps({"text": f"document {i} " + "has some words " * (1 + i % 5)})
            for i in range(40)
        ]
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("\n".join(rows))
        register_dataset(tmp_path.name, HubDataset(path=str(folder)))
        return tmp_path.name

    @pytest.mark.slow
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_end_of_stream_is_saved(self, tmp_path, caplog, finite_stream, accumulation):
        """The end of a stream is unknown in advance; the run uses every sample, saves, and logs the
        end."""
        options = {
            "dataloader__dataset": finite_stream,
            "training__epochs": 1,
            "training__steps": 1000,
        }
        options |= {"training__global_batch_size": 2 * accumulation, "checkpoint__enable": True}
        config = tiny_config(tmp_path / "run", **options)
        with caplog.at_level("INFO", logger="torchtitan"):
            trainer = run(config)
        loader = config.dataloader.build(
            tokenizer=trainer.tokenizer, seq_len=32, local_batch_size=2, epochs=1
        )
        assert trainer.step == math.ceil(len(list(loader)) / accumulation) > 2
        assert (tmp_path / "run" / "checkpoint" / f"step-{trainer.step}" / "complete.json").exists()
        assert f"the data ended after step {trainer.step}" in caplog.text

    @pytest.mark.slow
    def test_stream_that_ends_earlier_on_one_rank(self, tmp_path):
        """One rank has ten times the data; both continue to its end, and validation on a stream
        ends too."""
        data = tmp_path / "data"
        data.mkdir()
        for name, documents in (("a", 40), ("b", 4)):
            rows = [
                json.dumps({"text": f"document {name} {i} has a few words"})
                for i in range(documents)
            ]
            (data / f"{name}.jsonl").write_text("\n".join(rows))
        module = tmp_path / "streamed"
        module.mkdir()
        (module / "config_registry.py").write_text(
            "from torchtitan.components.data import HubDataset, register_dataset\n"
            "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
            f"register_dataset('uneven', HubDataset(path={str(data)!r}))\n"
            "def streamed_debugmodel():\n    return llama3_debugmodel()\n"
        )
        options = {
            "module": module,
            "dataloader__dataset": "uneven",
            "training__epochs": 1,
            "training__steps": 1000,
        }
        options |= {
            "validator__enable": True,
            "validator__dataset": "uneven",
            "checkpoint__enable": True,
        }
        printed = launch(tmp_path / "run", 2, **options)
        assert "the data ended after step" in printed
        steps = [step for (step,) in read_metrics(tmp_path / "run")]
        assert 5 < len(steps) < 20
        assert (tmp_path / "run" / "checkpoint" / f"step-{steps[-1]}" / "complete.json").exists()
        assert [step for step, _ in read_validation(tmp_path / "run")] == steps[-1:]

    def test_last_step_of_an_epoch_may_be_smaller(self, tmp_path, small_text):
        trainer = train(
            tmp_path,
            dataloader__dataset=small_text,
            training__epochs=1,
            training__global_batch_size=6,
            training__steps=1,
        )
        samples = trainer.dataloader.n_samples
        assert samples % 6 != 0
        assert trainer.step == math.ceil(samples / 6)
        assert all(loss > 0 for _, loss in read_metrics(tmp_path, "loss"))


class TestCheck:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"training__global_batch_size": 3}, "global_batch_size 3 is not a multiple"),
            ({"training__seq_len": 0}, "training.seq_len is 0"),
            ({"parallelism__data_parallel_shard_degree": 3}, "is not the number of processes, 1"),
            ({"model__vocab_size": 100}, "2048 tokens.*only 100"),
            ({"training__max_norm": 0}, "max_norm"),
        ],
    )
    def test_mistakes_are_reported(self, tmp_path, options, message):
        with pytest.raises(UserError, match=message):
            tiny_config(tmp_path, **options).check(world_size=1)

    def test_the_folder_of_the_model_is_no_output_folder(self, tmp_path):
        model, link = tmp_path / "model", tmp_path / "link"
        model.mkdir()
        link.symlink_to(model)
        shutil.copytree(EMBEDDED_TOKENIZER, model, dirs_exist_ok=True)
        train(model, hf_assets_path=str(model), training__steps=1)  # only a tokenizer
        (model / "config.json").write_text("{}")
        for folder in (model, link):
            config = tiny_config(folder, hf_assets_path=str(model))
            with pytest.raises(UserError, match="is the folder of the model .--hf_assets_path.;"):
                config.check(world_size=1)
        tiny_config(model / "outputs", hf_assets_path=str(model)).check(world_size=1)

    def test_explicit_vocabulary_wins(self, tmp_path):
        assert train(tmp_path, model__vocab_size=3000).config.model_spec.model.vocab_size == 3000
        assert train(tmp_path / "derived").config.model_spec.model.vocab_size == 2048

    def test_sequence_longer_than_the_model_s_warns(self, tmp_path, caplog):
        with caplog.at_level("WARNING", logger="torchtitan"):
            train(tmp_path, model__max_seq_len=16, training__steps=1)
        assert (
            "training.seq_len 32 exceeds the model's maximum sequence length of 16 tokens"
            in caplog.text
        )

    def test_loaders_without_a_validation_split_are_not_validated(self, tmp_path, caplog):
        text = tmp_path / "text.txt"
        text.write_text("some words to train on " * 50)
        with caplog.at_level("WARNING", logger="torchtitan"):
            train(tmp_path, dataloader__dataset=text, validator__enable=True)
        assert "no validation" in caplog.text
        assert read_validation(tmp_path) == []
        assert BaseDataLoader.Config().for_validation("") is None

    def test_validation_data_without_validation_warns(self, tmp_path, caplog):
        config = tiny_config(tmp_path, validator__dataset=["a.jsonl"], validator__enable=False)
        with caplog.at_level("WARNING", logger="torchtitan"):
            assert Trainer.build_validator(SimpleNamespace(config=config)) is None
        assert "--validator.dataset is set, but validation is off" in caplog.text


@pytest.mark.long
def test_debug_model_learns(tmp_path):
    """In 100 steps, training and validation loss fall from about ln(2048) = 7.6 to well under
    half."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.dump_folder = str(tmp_path)
    config.metrics.log_freq = 1
    run(config)
    losses = [loss for _, loss in read_metrics(tmp_path, "loss")]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.2)
    assert sum(losses[-5:]) / 5 < 0.45 * math.log(2048)
    assert read_validation(tmp_path)[-1][1] < 0.45 * math.log(2048)


def test_every_generator_is_seeded(tmp_path):
    drawn = []
    for _ in range(2):
        trainer = Trainer(tiny_config(tmp_path, debug__seed=5))
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
        trainer.close()
    assert drawn[0] == drawn[1]


def test_global_settings_are_restored(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    config = tiny_config(tmp_path, debug__deterministic=True)
    config.model_spec.loss = InfiniteLoss.Config()
    with pytest.raises(NonFiniteError):
        run(config)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert gc.isenabled()
    assert not torch.are_deterministic_algorithms_enabled()
    trainer = tiny_config(tmp_path / "ended").build()
    trainer.train()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    trainer.close()


def test_deterministic_mode_and_seed(tmp_path):
    first = train(tmp_path / "1", debug__deterministic=True)
    train(tmp_path / "2", debug__deterministic=True)
    train(tmp_path / "3", debug__seed=1)
    runs = [read_metrics(tmp_path / str(n), "loss") for n in (1, 2, 3)]
    assert runs[0] == runs[1] != runs[2]
    assert first.step == 4


def test_positions_in_a_batch_are_rejected(tmp_path):
    """No model reads them, so that documents would attend to each other."""
    trainer = tiny_config(tmp_path).build()
    with pytest.raises(UserError, match=r"AttentionMetadata\.from_positions"):
        trainer.post_dataloading_process(
            {"input": torch.zeros(1, 4), "positions": torch.zeros(1, 4)}
        )
    trainer.close()
