"""Custom losses: the documented example in every layout, and the error for an operation that
DTensor lacks."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.commands import run_command
from tests.conftest import PROJECT
from tests.test_docs import documented_class
from tests.training import TINY, RaggedDataLoader, flags, read_metrics, run, tiny_config
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.tools.errors import UserError

TOLERANCE = 1e-5  # relative: float32 sums in a different order
PENALTY = 0.1  # larger than the documented 1e-4, so that it has a visible effect
PROBLEM = {
    "training__steps": 2,
    "training__global_batch_size": 4,
    "training__mixed_precision_param": "float32",
    "loss__chunk_tokens": 20,
}
TP2 = {"parallelism__tensor_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP 2": {},
    "TP 2": TP2,
    "TP 2, whole logits": {**TP2, "parallelism__disable_loss_parallel": True},
    "CP 2": {"parallelism__context_parallel_degree": 2},
    "PP 2": {"parallelism__pipeline_parallel_degree": 2},
}


def train_documented_loss(folder: Path, options: dict[str, Any], penalty: float = PENALTY) -> None:
    config = tiny_config(folder, **{**PROBLEM, **options})
    config.dataloader = RaggedDataLoader.Config(**config.dataloader.to_dict())
    z_loss = documented_class(PROJECT / "docs" / "extending.md", "ZLoss")
    config.model_spec.loss = z_loss.Config(
        chunk_tokens=config.model_spec.loss.chunk_tokens, weight=penalty
    )
    run(config)


def numbers(folder: Path) -> list[float]:
    return [number for step in read_metrics(folder, "loss", "grad_norm") for number in step]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("single")
    train_documented_loss(folder / "with", {})
    train_documented_loss(folder / "without", {}, penalty=0.0)
    # The penalty dominates the loss.
    assert numbers(folder / "with")[1] > 1.5 * numbers(folder / "without")[1]
    return numbers(folder / "with")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_documented_loss_matches_a_single_process(layout, workers, expected, tmp_path):
    workers.run(train_documented_loss, tmp_path, LAYOUTS[layout])
    assert numbers(tmp_path) == pytest.approx(expected, rel=TOLERANCE)


class MaskedLoss(CrossEntropyLoss):
    """Loss that indexes by a mask, which DTensor does not support."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return super().from_logits(logits_NV[labels_N != -100], labels_N[labels_N != -100])


class MistakenLoss(CrossEntropyLoss):
    """Loss that fails in any layout."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return torch.gather(logits_NV, 1, labels_N[:, None, None]).sum()


class LostPeerLoss(CrossEntropyLoss):
    """Loss whose communication fails; it communicates only if logits are sharded."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        if isinstance(logits_NV, DTensor):
            dist.all_reduce(None)  # type: ignore[arg-type]  # raises an error of torch.distributed, like a lost peer
        return super().from_logits(logits_NV, labels_N)


def train_and_expect(
    folder: Path, loss: type[CrossEntropyLoss], error: type[Exception], words: str
) -> None:
    config = tiny_config(folder, **{**PROBLEM, **TP2})
    config.model_spec.loss = loss.Config()
    with pytest.raises(error, match=words):
        run(config)


@pytest.mark.slow
def test_an_operation_that_dtensor_lacks_names_the_option_to_set(workers, tmp_path):
    operation, advice = r"\(aten\.nonzero\.default\)", r"--parallelism\.disable_loss_parallel"
    words = f"^the loss .*{operation}; set {advice}, or .*$"  # one line
    workers.run(train_and_expect, tmp_path, MaskedLoss, UserError, words)


@pytest.mark.slow
def test_an_error_in_the_loss_is_raised_unchanged(workers, tmp_path):
    """No option fixes it, and it occurs with plain tensors too."""
    workers.run(
        train_and_expect,
        tmp_path,
        MistakenLoss,
        RuntimeError,
        "^Index tensor must have the same number of dim",
    )


def test_a_communication_error_is_raised_unchanged(workers, tmp_path):
    workers.run(train_and_expect, tmp_path, LostPeerLoss, TypeError, "Invalid function argument")


MODULE = """
from tests.components.losses.test_custom_loss import MaskedLoss
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def masked():
    config = llama3_debugmodel()
    config.model_spec.loss = MaskedLoss.Config()
    return config
"""


@pytest.mark.slow
def test_the_command_prints_the_error_without_a_traceback(tmp_path):
    folder = tmp_path / "masked_loss"
    folder.mkdir()
    (folder / "config_registry.py").write_text(MODULE)
    options = {**TINY, "parallelism.tensor_parallel_degree": 2, "dump_folder": tmp_path / "outputs"}
    words = ["--module", str(folder), "--config", "masked", *flags(options)]
    environment = {**os.environ, "NGPU": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "torchtitan", "train", *words]
    result = run_command(command, env=environment)
    assert result.returncode == 2, result.stderr
    # PyTorch may add its own warning about the store, which has ended with the first process.
    assert "Traceback" not in result.stderr
    assert result.stderr.count("--parallelism.disable_loss_parallel") == 1
