"""Runs with tied embeddings in a pipeline: checkpoints, other formats, and frozen embeddings. The
first and the last stage have a copy of the embedding, on different ranks (1F1B) or on the same rank
(ZBVZeroBubble)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.equivalence.workers import Workers
from tests.pretrained import FLOAT32, LAST_IN_HF, from_folder, make_pretrained
from tests.training import read_metrics, run, tiny_config, train
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.optim.freeze import Freeze
from torchtitan.components.peft import LoRA
from torchtitan.trainer import Trainer

TIED = {
    **FLOAT32,
    "model__tie_embeddings": True,
    "model__n_layers": 4,
    "training__local_batch_size": 4,
    "training__max_norm": 0.5,
    "lr_scheduler__total_steps": 6,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
}
PIPELINES = {
    name: {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": name,
    }
    for name in ("1F1B", "ZBVZeroBubble")
}
EMBEDDING = "tok_embeddings.weight"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


@pytest.fixture(params=PIPELINES)
def layout(request) -> dict[str, Any]:
    return PIPELINES[request.param]


def copies_of_embedding(trainer: Trainer) -> list[torch.Tensor]:
    """Return the copies on all ranks."""
    own = [
        part.tok_embeddings.weight.detach()
        for part in trainer.model_parts
        if part.tok_embeddings is not None
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return [copy for copies in gathered for copy in copies]


def train_and_check(folder: Path, *converters: Any, **options: Any) -> None:
    """Train with weight decay of the embedding. Check that its copies stay bit-identical and count
    once."""
    config = tiny_config(folder, **{**TIED, **options})
    config.model_converters += converters
    config.optimizer.param_groups = {}
    trainer = Trainer(config)
    try:
        whole = trainer.config.model_spec.model.build()
        assert trainer.num_parameters == whole.num_parameters()
        if not converters:
            assert trainer.num_trained == whole.num_parameters()
            assert trainer.flops_per_token == whole.flops_per_token(config.training.seq_len)
        trainer.train()
        first, second = copies_of_embedding(trainer)
        assert torch.equal(first, second)
    finally:
        trainer.close()


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and moments of a checkpoint by name."""
    states = {state: DcpSource(folder, state) for state in ("model", "optimizer")}
    return {
        f"{state}.{name}": source.read(name)
        for state, source in states.items()
        for name in source.specs
    }


def test_a_resumed_run_is_bit_identical(workers, tmp_path, layout):
    workers.run(train_runs, tmp_path, layout)
    assert read_metrics(tmp_path / "resumed", "loss", "grad_norm") == read_metrics(
        tmp_path / "straight", "loss", "grad_norm"
    )
    resumed, straight = (
        saved_tensors(tmp_path / name / "checkpoint" / "step-6") for name in ("resumed", "straight")
    )
    assert f"optimizer.state.{EMBEDDING}.exp_avg" in straight
    assert resumed.keys() == straight.keys()
    source = DcpSource(tmp_path / "straight" / "checkpoint" / "step-6")
    assert len(source._metadata.state_dict_metadata[f"model.{EMBEDDING}"].chunks) == 1  # saved once
    assert [
        name for name, tensor in resumed.items() if not torch.equal(tensor, straight[name])
    ] == []


def train_runs(folder: Path, layout: dict[str, Any]) -> None:
    train_and_check(folder / "straight", **layout, training__steps=6)
    for steps in (3, 6):
        train_and_check(folder / "resumed", **layout, training__steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_first", [True, False])
def test_resumes_in_another_layout(workers, tmp_path, layout, pipeline_first):
    """One process continues what a pipeline began, and the reverse."""
    run_one(tmp_path / "one", 6)
    if pipeline_first:
        workers.run(train_pipeline, tmp_path / "moved", layout, 3)
        run_one(tmp_path / "moved", 6)
    else:
        run_one(tmp_path / "moved", 3)
        workers.run(train_pipeline, tmp_path / "moved", layout, 6)
    moved, one = (read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("moved", "one"))
    # Float32 sums in another order.
    assert moved == [pytest.approx(line, rel=1e-5) for line in one]


def train_pipeline(folder: Path, layout: dict[str, Any], steps: int) -> None:
    train_and_check(folder, **layout, training__steps=steps)


def run_one(folder: Path, steps: int, *converters: Any) -> None:
    config = tiny_config(folder, **TIED, training__steps=steps)
    config.model_converters += converters
    config.optimizer.param_groups = {}
    run(config)


def test_starts_from_hugging_face_and_exports_to_it(workers, tmp_path, layout):
    """With learning rate 0, the exported weights are the weights that both copies were loaded
    from."""
    source = make_pretrained(tmp_path / "source", tie_word_embeddings=True, num_hidden_layers=4)
    workers.run(start_and_export, tmp_path / "run", source, layout)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (source, tmp_path / "run/checkpoint/step-2")
    )
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    assert json.loads((tmp_path / "run/checkpoint/step-2/config.json").read_text())[
        "tie_word_embeddings"
    ]


def start_and_export(folder: Path, source: Path, layout: dict[str, Any]) -> None:
    still = {"optimizer__lr": 0, "training__steps": 2}
    train_and_check(folder, **{**layout, **from_folder(source), **LAST_IN_HF, **still})


FROZEN = {
    "LoRA": LoRA.Config(rank=4),
    "frozen embedding": Freeze.Config(include=["^tok_embeddings"]),
    "only the embedding is trained": Freeze.Config(include=["."], exclude=["^tok_embeddings"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_partly_frozen_models_match_one_process(workers, tmp_path, layout, name):
    workers.run(train_frozen, tmp_path / "two", layout, name)
    run_one(tmp_path / "one", 3, FROZEN[name])
    one, two = (read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("one", "two"))
    # Float32 sums in another order.
    assert two == [pytest.approx(line, rel=1e-5) for line in one]


def train_frozen(folder: Path, layout: dict[str, Any], name: str) -> None:
    train_and_check(folder, FROZEN[name], **layout, training__steps=3)


@pytest.mark.slow
def test_a_loss_that_ignores_the_output_weights(workers, tmp_path, layout):
    """The last stage's copy has no gradient of its own, and gets the one of the first stage."""
    workers.run(train_without_head, tmp_path / "two", layout)
    train(tmp_path / "one", trainer_class=WithoutHead, **TIED, training__steps=3)
    one, two = (read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("one", "two"))
    assert two == [pytest.approx(line, rel=1e-5) for line in one]


def hidden_squares(
    hidden_BLD: torch.Tensor, weight_VD: torch.Tensor, labels_BL: torch.Tensor
) -> torch.Tensor:
    return (hidden_BLD[..., 0] ** 2).sum()


class WithoutHead(Trainer):
    """Train with a loss of hidden states alone."""

    def build_loss(self) -> Any:
        return hidden_squares


def train_without_head(folder: Path, layout: dict[str, Any]) -> None:
    train(folder, trainer_class=WithoutHead, **{**TIED, **layout}, training__steps=3)
