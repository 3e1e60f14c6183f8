"""Processes that stay: what fails in one of them is told, and the next run is not harmed."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.equivalence.workers import WorkerFailure, Workers


def add_ranks(folder: Path) -> None:
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    (folder / f"{dist.get_rank()}: {total.item()}").touch()


def fail_on_second_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()


def die_on_second_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    ("failing", "told"), [(fail_on_second_rank, "ValueError: what went wrong"), (die_on_second_rank, "died")]
)
def test_a_failure_of_one_rank_is_told_and_the_next_run_is_a_fresh_one(tmp_path, failing, told):
    with Workers(2) as workers:
        workers.run(add_ranks, tmp_path)
        begun = time.monotonic()
        with pytest.raises(WorkerFailure) as error:
            workers.run(failing)
        assert "rank 1: " in str(error.value) and told in str(error.value)
        assert time.monotonic() - begun < 30  # not the limit of a collective
        for path in tmp_path.iterdir():
            path.unlink()
        workers.run(add_ranks, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0: 3", "1: 3"}
