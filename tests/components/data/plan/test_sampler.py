"""Step statistics that the trainer passes to the data loader, including the loss of each sample."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.processes import run_processes
from tests.training import read_metrics, run, tiny_config, train
from torchtitan.components.data.base import NO_DOCUMENT, BaseDataLoader, number_tokens, to_batch
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.experiments.template.trainer import TemplateTrainer
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer
from torchtitan.trainer.sample_losses import SampleLosses


class Documents(BaseDataLoader):
    """Data loader of random windows, and recorder of the observed statistics. Each window is packed
    with documents of random lengths and numbers, some of them twice, with masked labels and
    padding. Sample n depends only on n."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        needs_losses: bool = True

    def __init__(
        self,
        config,
        *,
        seq_len,
        local_batch_size,
        dp_rank=0,
        dp_world_size=1,
        global_batch_size,
        **_,
    ):
        super().__init__(config)
        self.needs_sample_losses = config.needs_losses
        self.seq_len = seq_len
        self.batch_size = local_batch_size
        self.global_batch_size = global_batch_size
        self.first, self.stride = dp_rank * local_batch_size, dp_world_size * local_batch_size
        self.observed = []

    def sample(self, n: int) -> dict[str, list[int]]:
        generator = np.random.default_rng(n)
        lengths = generator.integers(2, 12, 3)
        rest = self.seq_len - lengths.sum()
        tokens = generator.integers(3, 2000, self.seq_len + 1)
        labels = np.where(generator.random(self.seq_len) < 0.3, IGNORE_INDEX, tokens[1:])
        labels[self.seq_len - rest :] = IGNORE_INDEX
        labels[0] = tokens[1]
        return {
            "input": tokens[:-1].tolist(),
            "labels": labels.tolist(),
            "positions": [place for length in (*lengths, rest) for place in range(length)],
            "documents": [*(2**40 + generator.integers(0, 5, 3)).tolist(), NO_DOCUMENT],
        }

    def __next__(self):
        samples = [self.sample(self.first + i) for i in range(self.batch_size)]
        self.first += self.stride
        return to_batch(
            [{name: np.array(value) for name, value in sample.items()} for sample in samples]
        )

    def observe(self, statistics):
        self.observed.append(statistics)

    def state_dict(self):
        return {"first": self.first}

    def load_state_dict(self, state):
        self.first = state["first"]


def make_config(folder: Path, *, needs_losses: bool = True, **options):
    config = tiny_config(
        folder, **{"optimizer__lr": 0.0, "training__mixed_precision_param": "float32"} | options
    )
    config.dataloader = Documents.Config(needs_losses=needs_losses)
    return config


def reference(trainer: Trainer) -> list[dict[int, float]]:
    """Return for each step the mean loss of each document over its valid tokens, from unpacked
    forward passes."""
    loader, model, steps = trainer.dataloader, trainer.model_parts[0].eval(), []
    for step in range(trainer.step):
        losses: dict[int, list[float]] = {}
        for n in range(step * loader.global_batch_size, (step + 1) * loader.global_batch_size):
            sample = loader.sample(n)
            starts = [i for i, position in enumerate(sample["positions"]) if position == 0] + [
                loader.seq_len
            ]
            for number, begin, end in zip(sample["documents"], starts, starts[1:], strict=False):
                labels = torch.tensor(sample["labels"][begin:end])
                with torch.no_grad():
                    logits = model(torch.tensor([sample["input"][begin:end]]))[0]
                token_losses = F.cross_entropy(
                    logits.double(), labels, reduction="none", ignore_index=IGNORE_INDEX
                )
                losses.setdefault(number, []).extend(token_losses[labels != IGNORE_INDEX].tolist())
        steps.append(
            {
                number: sum(own) / len(own)
                for number, own in losses.items()
                if own and number != NO_DOCUMENT
            }
        )
    return steps


def as_dicts(observed) -> list[dict[int, float]]:
    return [
        dict(zip(of.samples.tolist(), of.sample_losses.tolist(), strict=True)) for of in observed
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"training__global_batch_size": 6},
        {"loss__chunk_tokens": 24},
        {"loss__chunk_tokens": 0},
        {"compile__enable": True, "compile__backend": "aot_eager", "compile__components": ["loss"]},
    ],
    ids=["accumulation", "chunks", "plain", "compiled"],
)
def test_loss_of_each_sample(tmp_path, options):
    trainer = run(make_config(tmp_path / "run", **options, training__steps=2))
    expected = reference(trainer)
    # The last reduction is in float32 or float64, and attention sums in a different order.
    assert as_dicts(trainer.dataloader.observed) == [
        pytest.approx(losses, rel=1e-5) for losses in expected
    ]
    # There are more documents than numbers, so some occur twice; the losses differ.
    assert all(
        2 < len(losses) <= 5 and max(losses.values()) - min(losses.values()) > 0.01
        for losses in expected
    )


def test_recording_losses_does_not_change_training(tmp_path):
    options = {"optimizer__lr": 1e-2, "loss__chunk_tokens": 24, "training__global_batch_size": 4}
    run(make_config(tmp_path / "asked", **options))
    trainer = run(make_config(tmp_path / "not", needs_losses=False, **options))
    assert read_metrics(tmp_path / "asked", "loss", "grad_norm") == read_metrics(
        tmp_path / "not", "loss", "grad_norm"
    )
    assert [(len(of.samples), len(of.sample_losses)) for of in trainer.dataloader.observed] == [
        (0, 0)
    ] * 4


def test_numbers_of_the_step(tmp_path):
    trainer = run(make_config(tmp_path, needs_losses=False, optimizer__lr=1e-2))
    observed = [(of.step, of.loss, of.grad_norm) for of in trainer.dataloader.observed]
    assert observed == read_metrics(tmp_path, "loss", "grad_norm")


def test_skipped_step_is_not_observed(tmp_path):
    class InfiniteOnce(CrossEntropyLoss):
        calls = 0

        def __call__(self, hidden_BLD, weight_VD, labels_BL):
            self.calls += 1
            loss = super().__call__(hidden_BLD, weight_VD, labels_BL)
            return loss * math.inf if self.calls == 2 else loss

    config = make_config(tmp_path, training__on_nonfinite="skip")
    config.model_spec.loss = InfiniteOnce.Config()
    trainer = run(config)
    assert [of.step for of in trainer.dataloader.observed] == [1, 3, 4]
    expected = [losses for step, losses in enumerate(reference(trainer), start=1) if step != 2]
    assert as_dicts(trainer.dataloader.observed) == [
        pytest.approx(losses, rel=1e-5) for losses in expected
    ]


def test_validation_is_not_observed(tmp_path):
    """Forward passes of the validator do not count."""

    class Validated(Documents):
        @dataclass(kw_only=True, slots=True)
        class Config(Documents.Config):
            def for_validation(self, dataset):
                return Documents.Config()

    config = make_config(tmp_path, validator__enable=True, validator__freq=1, validator__steps=1)
    config.dataloader = Validated.Config()
    trainer = run(config)
    assert as_dicts(trainer.dataloader.observed) == [
        pytest.approx(losses, rel=1e-5) for losses in reference(trainer)
    ]


def test_step_of_the_template_records_losses(tmp_path):
    config = make_config(tmp_path)
    trainer = run(config, TemplateTrainer)
    assert as_dicts(trainer.dataloader.observed) == [
        pytest.approx(losses, rel=1e-5) for losses in reference(trainer)
    ]


def test_step_without_recording_raises(tmp_path):
    class CustomTrainer(Trainer):
        def train_step(self, batches):
            (batch,) = self.next_micro_batches(batches)
            n_tokens = self.count_valid_tokens([batch])
            loss = self.forward_backward_step(self.post_dataloading_process(batch), n_tokens)
            return self.read_result(loss, self.clip_gradients(), n_tokens)

    run(make_config(tmp_path / "not", needs_losses=False), CustomTrainer)
    with pytest.raises(UserError, match=r"self\.sample_losses\.of"):
        run(make_config(tmp_path / "asked"), CustomTrainer)


def test_loss_without_token_losses_is_rejected():
    loss = CrossEntropyLoss.Config().build()
    with pytest.raises(UserError, match="pipeline_parallel_degree 2"):
        SampleLosses(loss, ParallelDims(world_size=2, pp=2), wanted=True)
    with pytest.raises(UserError, match="needs per-sample losses, which function does not provide"):
        SampleLosses(lambda *_: None, ParallelDims(world_size=1), wanted=True)
    SampleLosses(lambda *_: None, ParallelDims(world_size=2, pp=2), wanted=False)


def test_token_counts():
    batch = {
        "attention": AttentionMetadata.from_positions(
            torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 1], [0, 1, 2, 3, 4]])
        ),
        "documents": torch.tensor(
            [[7, 8, NO_DOCUMENT, NO_DOCUMENT], [1, 2, 3, 4], [NO_DOCUMENT] * 4]
        ),
    }
    expected = [[7, 7, 8, NO_DOCUMENT, NO_DOCUMENT], [1, 2, 3, 4, 4], [NO_DOCUMENT] * 5]
    assert number_tokens(batch).tolist() == expected


LAYOUTS = {
    "FSDP": {},
    "DDP": {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": 1,
    },
    "TP": {"parallelism__tensor_parallel_degree": 2},
    "TP, whole logits": {
        "parallelism__tensor_parallel_degree": 2,
        "parallelism__disable_loss_parallel": True,
    },
    "CP": {"parallelism__context_parallel_degree": 2},
}


def run_layouts(folder: Path, names: list[str]) -> None:
    """On each of two ranks, check that the layouts observe the same statistics as one process."""
    rank = torch.distributed.get_rank()
    expected = torch.load(folder / "expected.pt", weights_only=False)
    for name in names:
        sharded = "TP" in name or "CP" in name
        options = {
            "training__local_batch_size": 4 if sharded else 2,
            "training__global_batch_size": 8,
        }
        trainer = run(
            make_config(
                folder / f"{name} {rank}",
                **options,
                **LAYOUTS[name],
                loss__chunk_tokens=24,
                training__steps=2,
            )
        )
        observed = as_dicts(trainer.dataloader.observed)
        # Float32 sums in a different order.
        assert observed == [pytest.approx(losses, rel=1e-5) for losses in expected], name


@pytest.mark.slow
@pytest.mark.parametrize("names", [["TP"], [name for name in LAYOUTS if name != "TP"]])
def test_every_rank_observes_all_samples(tmp_path, names):
    options = {
        "training__local_batch_size": 4,
        "training__global_batch_size": 8,
        "training__steps": 2,
    }
    torch.save(reference(run(make_config(tmp_path / "one", **options))), tmp_path / "expected.pt")
    run_processes(run_layouts, 2, tmp_path, names)


def test_default_loader_ignores_statistics(tmp_path):
    """The default `observe` does nothing."""
    trainer = train(tmp_path)
    assert trainer.dataloader.needs_sample_losses is False
    assert trainer.dataloader.assets() == {}
